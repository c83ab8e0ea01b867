"""Answers as token ids: kept for later prompts (`transcripts`), and the reasoning before the text (`lead`,
`reasoning_limit`)."""
