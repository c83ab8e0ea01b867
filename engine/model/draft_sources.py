"""The folder of a draft model, once its vocabulary was found to be that of the model whose answers it guesses."""

from pathlib import Path

from engine.core.errors import StartupError
from engine.core.settings import EngineSettings
from engine.model.sources import NULL, Progress, resolve_model
from engine.model.tokenizer import Tokenizer


def draft_folder(settings: EngineSettings, folder: Path, progress: Progress) -> Path | None:
    """Find the draft model of an engine, whose own model stands in `folder`; None if it has none.

    Raises:
        StartupError: the draft model cannot be found, or has another vocabulary.
    """
    if settings.drafts is None or settings.drafts.model is None or settings.source.startswith(NULL):
        return None
    source = settings.drafts.model.source
    if source.startswith(NULL):
        raise StartupError(f"speculation.draft_model is {source}, which computes nothing")
    found = resolve_model(source, progress)
    if found != folder:
        difference = differs(Tokenizer(folder).vocabulary(), Tokenizer(found).vocabulary())
        if difference:
            raise StartupError(
                f"speculation.draft_model {source} has another vocabulary than model.source {settings.source}: "
                f"{difference}; a draft model needs the same tokenizer"
            )
    return found


def differs(vocabulary: dict[int, str], other: dict[int, str]) -> str:
    """Say by how much two vocabularies differ, and where first; nothing if they are equal."""
    token_ids = sorted(
        token_id for token_id in vocabulary.keys() | other.keys() if vocabulary.get(token_id) != other.get(token_id)
    )
    if not token_ids:
        return ""
    first = token_ids[0]
    names = ["no token" if name is None else repr(name) for name in (other.get(first), vocabulary.get(first))]
    return (
        f"{len(token_ids):,} of {len(vocabulary):,} token ids differ, the first is {first}, "
        f"{names[0]} there and {names[1]} here"
    )
