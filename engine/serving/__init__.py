"""Answers requests from their bodies on, without Ray: what an ingress replica and the local server are made of.

Going down, `reading` checks and tokenizes a body, in a process beside the event loop where the body is long, and
`preparation` makes a `job` of it. Coming up, `output` makes text of the tokens and `rendering` makes responses of the
text. `accounting` sees the end. What another process must do is a parameter or a protocol here: generating, and keeping
answers for later requests (`answer_keeper`).
"""
