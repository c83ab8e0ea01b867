"""Drafts: guessed next tokens of decoding requests, checked in the step that computes the next token anyway."""
