"""Anthropic's Messages API: bodies of requests, answers, errors."""
