"""Draws the diagrams of the documents: `python docs/diagrams.py` writes them into `docs/images`.

A diagram is one SVG file for light and dark: its colours follow `prefers-color-scheme`, and it has a ground of its own,
so that it can be read where the page around it is of the other kind. Each is `WIDTH` units wide and drawn for a narrow
screen: a letter is still 9 px high where a phone of 360 px leaves 328 px for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "images"
WIDTH = 440
SHOWN_WIDTH = 500
"""Pixels that a diagram takes where there is room."""
TITLE, TEXT = 15, 14
"""Sizes of letters, in units."""
LETTER, BOLD_LETTER = 0.56, 0.65
"""Mean width of a letter, of its size, in a text and in a title: as wide as in the widest of the typefaces."""
LINE = 18
"""Distance of lines of text."""

STYLE = """
svg { --ground: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #6e7781; --plain: #f6f8fa;
  --cached: #dafbe1; --cached-line: #1a7f37; --computed: #fff1e5; --computed-line: #bc4c00;
  --moved: #ddf4ff; --moved-line: #0969da }
@media (prefers-color-scheme: dark) {
  svg { --ground: #161b22; --ink: #e6edf3; --soft: #9da7b1; --line: #8b949e; --plain: #21262d;
    --cached: #12301f; --cached-line: #3fb950; --computed: #3a2112; --computed-line: #f0883e;
    --moved: #10294a; --moved-line: #58a6ff } }
text { fill: var(--ink); font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif }
.title { font-size: 15px; font-weight: 600 }
.soft { fill: var(--soft) }
.ground { fill: var(--ground) }
rect { stroke-width: 1.5 }
.plain { fill: var(--plain); stroke: var(--line) }
.cached { fill: var(--cached); stroke: var(--cached-line) }
.computed { fill: var(--computed); stroke: var(--computed-line) }
.moved { fill: var(--moved); stroke: var(--moved-line) }
path { fill: none; stroke: var(--line); stroke-width: 1.5 }
.lane { stroke-dasharray: 2 4 }
.kv { stroke: var(--moved-line); stroke-width: 2; stroke-dasharray: 6 3 }
marker path { fill: var(--line); stroke: none }
#kv path { fill: var(--moved-line) }
"""


@dataclass(frozen=True, slots=True)
class Diagram:
    """A picture, with what a screen reader says of it."""

    title: str
    description: str
    height: int
    parts: Sequence[str]

    def svg(self) -> str:
        """The file's text."""
        shown_height = self.height * SHOWN_WIDTH // WIDTH
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{SHOWN_WIDTH}" '
                f'height="{shown_height}" role="img" aria-labelledby="title desc">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="desc">{escape(self.description)}</desc>',
                f"<style>{STYLE}</style>",
                f"<defs>{_head('arrow')}{_head('kv')}</defs>",
                f'<rect class="ground" width="{WIDTH}" height="{self.height}" rx="6"/>',
                *self.parts,
                "</svg>\n",
            )
        )


def _head(name: str) -> str:
    """The head of an arrow."""
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse" markerUnits="userSpaceOnUse"><path d="M0 0 8 4 0 8z"/></marker>'
    )


def length(words: str, look: str = "") -> float:
    """Units that a line of text takes."""
    return len(words) * (TITLE * BOLD_LETTER if look == "title" else TEXT * LETTER)


def text(x: float, y: float, words: str, look: str = "", anchor: str = "middle") -> str:
    """One line of text, whose base line is at `y`. Raises ValueError where it would leave the picture."""
    wide = length(words, look)
    left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
    if left < 0 or left + wide > WIDTH:
        raise ValueError(f"{words!r} reaches from {left:.0f} to {left + wide:.0f}")
    kind = f' class="{look}"' if look else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def box(x: float, y: float, wide: float, high: float, kind: str, title: str, *lines: str) -> str:
    """A box with a title and lines below it, all in its middle. Raises ValueError where a line is too long for it."""
    look = "title" if lines else ""
    longest = max(length(title, look), *map(length, lines), 0)
    if longest > wide - 4:
        raise ValueError(f"{title!r} takes {longest:.0f} of {wide:g}")
    first = y + (high - LINE * len(lines)) / 2 + 5
    return "\n".join(
        (
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="5"/>',
            text(x + wide / 2, first, title, look),
            *(text(x + wide / 2, first + LINE * number, line) for number, line in enumerate(lines, start=1)),
        )
    )


def arrow(*points: tuple[float, float], kv: bool = False, both: bool = False) -> str:
    """An arrow along points; with `kv` one on which KV moves, with `both` one with two heads."""
    head = "kv" if kv else "arrow"
    start = f' marker-start="url(#{head})"' if both else ""
    way = "M" + " ".join(f"{x:g} {y:g}" for x, y in points)
    kind = ' class="kv"' if kv else ""
    return f'<path{kind} d="{way}" marker-end="url(#{head})"{start}/>'


def note(y: float, *lines: str) -> list[str]:
    """Lines below a picture."""
    return [text(14, y + LINE * number, line, anchor="start") for number, line in enumerate(lines)]


def processes() -> Diagram:
    """All processes, and what passes between them."""
    return Diagram(
        "The processes of raydix",
        "HTTP clients reach the ingress through HAProxy, Ray programs by a Serve handle. The ingress has the manager "
        "admit a request, and sends it to a prefill and a decode worker, whose tokens come back to it. The prefill "
        "worker's KV goes through Ray's object store, which the manager owns, to the decode worker.",
        532,
        [
            box(10, 10, 205, 58, "plain", "HTTP clients", "openai, curl, raydix chat"),
            box(225, 10, 205, 58, "plain", "Ray programs", "Serve handle"),
            arrow((112, 68), (112, 98)),
            box(10, 98, 205, 34, "plain", "HAProxy"),
            arrow((112, 132), (112, 162)),
            arrow((327, 68), (327, 162)),
            box(10, 162, 420, 58, "plain", "Ingress, one or more replicas", "APIs, tokenizer, dispatcher"),
            arrow((66, 220), (66, 296), both=True),
            text(75, 254, "admit,", anchor="start"),
            text(75, 272, "settle", anchor="start"),
            arrow((205, 220), (205, 296), both=True),
            text(214, 254, "requests,", anchor="start"),
            text(214, 272, "tokens", anchor="start"),
            arrow((359, 220), (359, 296), both=True),
            box(10, 296, 112, 82, "plain", "Manager", "where KV is,", "who computes"),
            box(130, 296, 146, 82, "plain", "Prefill worker", "scheduler,", "model, KV pool"),
            box(284, 296, 146, 82, "plain", "Decode worker", "scheduler,", "model, KV pool"),
            arrow((66, 378), (66, 438)),
            text(75, 412, "owns", anchor="start"),
            arrow((205, 378), (205, 438), kv=True),
            text(214, 412, "KV segments", anchor="start"),
            arrow((359, 438), (359, 378), kv=True),
            box(10, 438, 420, 58, "moved", "Ray's object store", "exported KV, in shared memory"),
            text(220, 520, "Each worker tells the manager which blocks it holds.", "soft"),
        ],
    )


LANES = {"client": 38, "ingress": 124, "manager": 222, "prefill": 310, "decode": 398}
"""Places of the actors of a request's life."""


def request() -> Diagram:
    """The life of a request, numbered as in ARCHITECTURE.md."""
    top, step = 74, 37
    steps: list[tuple[str, str, str, bool]] = [
        ("client", "ingress", "1 a chat", False),
        ("ingress", "ingress", "1 read, tokenized; 2 limits", False),
        ("ingress", "manager", "3 admit: the blocks' names", False),
        ("manager", "ingress", "3 which workers", False),
        ("ingress", "prefill", "4 PREFILL", False),
        ("ingress", "decode", "4 DECODE, which awaits the KV", False),
        ("prefill", "prefill", "5 a chunk in each step", False),
        ("prefill", "manager", "6 a segment is there", False),
        ("manager", "decode", "7 fetch the segment", False),
        ("prefill", "decode", "7 its blocks", True),
        ("prefill", "ingress", "8 the first token", False),
        ("ingress", "client", "8 text", False),
        ("prefill", "decode", "8 hand-over", True),
        ("decode", "ingress", "9 tokens, one list a step", False),
        ("ingress", "client", "9 text", False),
        ("ingress", "manager", "10 settle: leases and load", False),
    ]
    height = top + step * len(steps)
    parts = [f'<path class="lane" d="M{x} 44 {x} {height - 12}"/>' for x in LANES.values()]
    parts += [box(x - 36, 12, 72, 32, "plain", name) for name, x in LANES.items()]
    for number, (source, target, words, kv) in enumerate(steps):
        y = top + step * number
        left, right = sorted((LANES[source], LANES[target]))
        wide = length(words) + 8
        middle = min(max((left + right) / 2, wide / 2 + 2), WIDTH - wide / 2 - 2)
        # The ground behind the words hides the lanes that would run through them.
        parts.append(f'<rect class="ground" x="{middle - wide / 2:g}" y="{y - 9:g}" width="{wide:g}" height="18"/>')
        parts.append(text(middle, y + 5, words))
        if source != target:
            parts.append(arrow((LANES[source], y + 13), (LANES[target], y + 13), kv=kv))
    return Diagram(
        "The life of a request",
        "A chat is read and tokenized by the ingress and admitted by the manager, which chooses a prefill and a decode "
        "worker. The prefill worker computes the prompt in chunks, whose blocks go to the decode worker as segments; "
        "the first token comes from the prefill worker, all others from the decode worker. At the end the ingress "
        "settles the request at the manager.",
        height,
        parts,
    )


def hashes() -> Diagram:
    """The names of a prompt's blocks, and which of them are hits."""
    columns = [94 + 84 * number for number in range(4)]
    wide = 78

    def prompt(y: float, label: str, blocks: Sequence[str], names: Sequence[str], kinds: Sequence[str]) -> list[str]:
        """The blocks of a prompt, and below them the chain of their names."""
        parts = [text(14, y, label, "title", anchor="start"), box(14, y + 76, 58, 32, "plain", "model")]
        for x, block, name, kind in zip(columns, blocks, names, kinds, strict=True):
            parts.append(box(x, y + 14, wide, 36, kind, block))
            parts.append(arrow((x + wide / 2, y + 50), (x + wide / 2, y + 76)))
            parts.append(box(x + 12, y + 76, wide - 24, 32, "plain", name))
        ends = [72.0, *(x + wide - 12 for x in columns)]
        parts += [arrow((end, y + 92), (x + 12, y + 92)) for end, x in zip(ends, columns, strict=False)]
        return parts

    middles = [x + wide / 2 for x in columns]
    return Diagram(
        "The chain of hashes, and what a hit is",
        "A block's name is a hash of its tokens and of the name of the block before it; the first one begins with the "
        "model's. Two prompts that begin with the same two blocks have the same two names: these are hits. The third "
        "block differs, so its name does, and also that of the fourth, although its words are the same.",
        394,
        [
            *prompt(
                28,
                "A first prompt",
                ("You are", "a library", "Closed", "today?"),
                ("a3f1", "9c07", "51be", "e2d8"),
                ("computed",) * 4,
            ),
            *prompt(
                174,
                "A later prompt, on any worker",
                ("You are", "a library", "Open", "today?"),
                ("a3f1", "9c07", "7d40", "08c6"),
                ("cached", "cached", "computed", "computed"),
            ),
            *(
                text(x, 302, words, "soft")
                for x, words in zip(middles, ("hit", "hit", "computed", "computed"), strict=True)
            ),
            *note(
                334,
                "A name covers the block and all that precedes it:",
                "the same words behind others are another block.",
                "Under equal names all workers have the same bits.",
            ),
        ],
    )


def handover() -> Diagram:
    """A prompt of three chunks, computed at one worker and answered by another."""
    chunks = [(14, 142), (142, 238), (238, 326)]
    segments = [(150, 218), (246, 312), (334, 392)]
    parts = [text(14, y, words, "title", anchor="start") for y, words in ((24, "Client"), (92, "Prefill worker"))]
    parts += [
        text(14, y, words, "title", anchor="start") for y, words in ((176, "Object store"), (260, "Decode worker"))
    ]
    for number, (start, end) in enumerate(chunks, start=1):
        parts.append(box(start, 102, end - start, 34, "computed", f"chunk {number}"))
    for number, (start, end) in enumerate(segments, start=1):
        parts.append(arrow((start - 8, 136), (start - 8, 203), (start, 203), kv=True))
        parts.append(box(start, 186, end - start, 34, "moved", "blocks" if number < 3 else "last"))
        parts.append(arrow((end - 10, 220), (end - 10, 270), kv=True))
    parts.append(box(14, 270, 376, 34, "plain", "steps of other requests, undisturbed"))
    parts.append(box(392, 270, 38, 34, "computed", "…"))
    # The first token leaves the prefill worker, the others leave the decode worker.
    parts += [arrow((326, 102), (326, 48)), arrow((411, 270), (411, 48))]
    parts += [text(326, 40, "token 1"), text(404, 40, "2, 3, …")]
    parts += note(
        334,
        "Blocks leave while the next chunk is computed.",
        "The first token waits for no transfer; the last",
        "blocks, a partial one too, let the answer go on.",
        "What does not arrive is computed: the same bits.",
    )
    return Diagram(
        "The hand-over from prefill to decode",
        "The prefill worker computes the prompt in three chunks. The blocks of each chunk go through the object store "
        "to the decode worker while the next chunk is computed. The first token goes to the client from the prefill "
        "worker; the decode worker, whose other requests went on meanwhile, samples all further ones.",
        404,
        parts,
    )


def draft() -> Diagram:
    """A step that checks a draft of three tokens."""
    columns = [124, 208, 292, 376]
    inputs, sampled = ("last", "5", "6", "7"), ("5", "6", "9", "")
    parts = [
        text(14, y, words, anchor="start")
        for y, words in ((29, "position"), (65, "input"), (189, "sampled"), (222, "so"))
    ]
    for x, position in zip(columns, (12, 13, 14, 15), strict=True):
        parts.append(text(x, 29, str(position), "soft"))
    for x, token, kind in zip(columns, inputs, ("plain", "moved", "moved", "moved"), strict=True):
        parts += [box(x - 26, 42, 52, 34, kind, token), arrow((x, 76), (x, 104))]
    parts.append(box(90, 104, 336, 34, "plain", "one step of the model, a row for each"))
    for x, token, kind in zip(columns[:3], sampled, ("cached", "cached", "computed"), strict=False):
        parts += [arrow((x, 138), (x, 166)), box(x - 26, 166, 52, 34, kind, token)]
    # A sampled token is compared with the draft's token in the next column.
    for (left, right), equal in zip(pairwise(columns), ("=", "=", "≠"), strict=True):
        parts.append(text((left + right) / 2, 189, equal, "title"))
    for x, words in zip(columns, ("as drafted", "as drafted", "new", "forgotten"), strict=True):
        parts.append(text(min(x, 396), 222, words, "soft"))
    parts += note(
        256,
        "The draft is 5 6 7. Row 14 samples 9 and not 7, so",
        "the answer goes on with 5 6 9: three tokens of one",
        "step, each sampled behind the answer before it.",
        "Without a draft the answer has the same tokens.",
    )
    return Diagram(
        "A draft being checked",
        "A step of the model computes the last token and the three draft tokens 5, 6 and 7 in a row each. It samples "
        "5, 6 and 9: the first two are as drafted, 9 differs from the draft's 7, and the row behind 7 is forgotten. "
        "The answer goes on with 5, 6, 9.",
        326,
        parts,
    )


DIAGRAMS = {"processes": processes, "request": request, "hashes": hashes, "handover": handover, "draft": draft}
"""Each diagram by the name of its file."""


def main() -> None:
    """Writes all diagrams."""
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(drawn().svg())


if __name__ == "__main__":
    main()
