"""Answers as token ids: kept for later prompts (`transcripts`), and the reasoning before a prescribed form (`lead`)."""
