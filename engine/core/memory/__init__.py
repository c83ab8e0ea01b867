"""What later requests of clients refer to: token ids of answers, stored responses, and how answers began."""
