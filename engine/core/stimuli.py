"""Recording of the events that a state machine is told, so that an incident becomes a unit test.

The machines of the core read no clock, draw no chance, and let no decision hang on the order of a set: the same
events, in the same order, bring a fresh machine of the same settings into the same state, through the same
instructions. A public method of a machine, or of a part that is an attribute of the machine, is an event if it is
decorated with `stimulus`; calls among these methods are consequences and are not noted. Recording
costs an unrecorded machine nothing: a `Recorder` wraps the methods of the one machine that it records.

| argument | its note |
|---|---|
| a number, a string, bytes, an enumeration | the same |
| a list, tuple or set of strings, bytes or enumerations | a tuple of the same |
| a list, tuple or set of numbers, which may be tokens | a tuple of as many zeros |
| of a type that the machine names (`Notes`) | no more than decisions depend on |
| anything else, such as a reference to a payload | `HIDDEN` |

So a recording holds no prompt, no generated text and no KV.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from io import BytesIO
from operator import attrgetter
from typing import NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

P = ParamSpec("P")
R = TypeVar("R")
MARK = "is_stimulus"


class Hidden(Enum):
    """The note of an argument that is not noted."""

    HIDDEN = "hidden"


HIDDEN = Hidden.HIDDEN


@runtime_checkable
class Note(Protocol):
    """The note of an argument that a machine cannot be told again as it is."""

    def recall(self, machine: object) -> object:
        """The argument for another machine in the same state."""
        ...


@dataclass(frozen=True, slots=True)
class Notes:
    """A machine's way with arguments that are not plain."""

    values: Mapping[type, Callable[..., object]] = field(default_factory=dict)
    """For each type, a function from a value to its `Note`, or to the value itself without its tokens."""
    runs: Mapping[type, Callable[..., Note]] = field(default_factory=dict)
    """For types that come in great numbers, a function from a run that begins with one to the note of all."""


def as_it_is(value: object) -> object:
    """The note of a value without tokens."""
    return value


class Stimulus(NamedTuple):
    """One event: the method of the machine, `part.method` of one of its parts, and the notes of its arguments."""

    name: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    def dump(self) -> bytes:
        """The event for a file: a record is the dumps of its parts, one behind the other."""
        return pickle.dumps(tuple(self))


@dataclass(frozen=True, slots=True)
class Record:
    """The life of a machine so far: the call that made the machine, as it was, and the stimuli since."""

    made: Stimulus
    stimuli: tuple[Stimulus, ...]

    @staticmethod
    def load(dumped: bytes) -> "Record":
        """A record from a file of the same version of the project; a last stimulus that is not whole, because the
        writing process died, is left out. As any pickle, to be loaded only where the author of the file is trusted."""
        stream, loaded = BytesIO(dumped), []
        while stream.tell() < len(dumped):
            try:
                loaded.append(Stimulus(*pickle.load(stream)))
            except (EOFError, pickle.UnpicklingError):
                break
        made, *stimuli = loaded
        return Record(made, tuple(stimuli))


def stimulus(method: Callable[P, R]) -> Callable[P, R]:
    """Declare a method of a machine an event."""
    setattr(method, MARK, True)
    return method


def events_of(machine: object) -> dict[str, object]:
    """Event methods, each with its object: the machine or a part."""
    events = dict.fromkeys(_marked(machine), machine)
    parts = vars(machine) if hasattr(machine, "__dict__") else {}
    return events | {f"{name}.{event}": part for name, part in parts.items() for event in _marked(part)}


def _marked(owner: object) -> list[str]:
    classes = reversed(type(owner).__mro__)
    return [name for each in classes for name, method in vars(each).items() if hasattr(method, MARK)]


class Recorder:
    """Notes the stimuli of one machine, each before the machine reacts."""

    def __init__(self, machine: object, notes: Notes, keep: Callable[[Stimulus], bool]) -> None:
        """`keep`: takes each stimulus; False: no more of them are wanted."""
        self._notes = notes
        self._keep = keep
        self._is_within = False
        """True while the machine reacts: calls of its own methods are no stimuli."""
        self._events = events_of(machine)
        for name, owner in self._events.items():
            method = name.rpartition(".")[2]
            setattr(owner, method, self._noting(name, getattr(owner, method)))

    def stop(self) -> None:
        """Leave the machine as if it had never been recorded."""
        for name, owner in self._events.items():
            delattr(owner, name.rpartition(".")[2])
        self._events = {}

    def _noting(self, name: str, method: Callable[P, R]) -> Callable[P, R]:
        def noted(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._is_within:
                return method(*args, **kwargs)
            if not self._keep(self._stimulus(name, args, kwargs)):
                self.stop()
            self._is_within = True
            try:
                return method(*args, **kwargs)
            finally:
                self._is_within = False

        return noted

    def _stimulus(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Stimulus:
        noted = tuple([self._note_of(value) for value in args])
        return Stimulus(name, noted, {key: self._note_of(value) for key, value in kwargs.items()})

    def _note_of(self, value: object) -> object:
        kind = type(value)
        if kind in PLAIN:
            return value
        note = self._notes.values.get(kind)
        if note is not None:
            return note(value)
        if isinstance(value, tuple | list | set | frozenset) and kind in RUNS:
            return self._note_of_run(value)
        return value if isinstance(value, Enum) else HIDDEN

    def _note_of_run(self, run: Iterable[object]) -> object:
        values = tuple(run)
        note = self._notes.runs.get(type(values[0])) if values else None
        if note is not None:
            return note(values)
        kinds = set(map(type, values))
        if kinds <= NAMES:
            return values
        return (0,) * len(values) if kinds <= PLAIN else tuple([self._note_of(value) for value in values])


NAMES = frozenset({str, bytes})
PLAIN = NAMES | {int, float, bool, type(None)}
RUNS = frozenset({tuple, list, set, frozenset})


def replay(stimuli: Iterable[Stimulus], machine: object) -> list[object]:
    """Tell a fresh machine what another one was told; returns the results, an error in place of a result that was one.

    The machine must have the settings of the other one, and the stimuli must be all since its making.
    """
    results: list[object] = []
    for name, args, kwargs in stimuli:
        recalled = [_recalled(value, machine) for value in args]
        named = {key: _recalled(value, machine) for key, value in kwargs.items()}
        try:
            results.append(attrgetter(name)(machine)(*recalled, **named))
        except Exception as error:  # of any kind: the other machine raised, too, and went on
            results.append(error)
    return results


def _recalled(value: object, machine: object) -> object:
    if type(value) is tuple:
        return tuple(_recalled(each, machine) for each in value)
    return value.recall(machine) if isinstance(value, Note) else value
