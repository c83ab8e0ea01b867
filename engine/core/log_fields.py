"""Fields of a log record beside its message, for programs that search the logs."""


def about(event: str, **fields: object) -> dict[str, object]:
    """`extra` of a log call: the kind of event, and its subjects (`request`, `attempt`, `worker`, counts, times).

    Never prompts, generated text or keys: names and figures only.
    """
    return {"about": {"event": event, **fields}}
