"""OpenAI's wire shapes and the types of the Python handle. No server, no Ray, no torch."""
