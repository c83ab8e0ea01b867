"""OpenAI's Responses API: bodies of requests, responses, what is stored of them."""
