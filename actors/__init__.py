"""All code that touches Ray: the actors, the deployments that host them, and the HTTP front."""
