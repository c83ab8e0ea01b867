"""The declaration of one route of the HTTP API: what it takes, answers and refuses, and who may ask.

`raydix.engine.api.routes` declares every route. The application, OpenAPI's document, the documentation, the recorder
and batches derive from these values.
"""

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Literal, TypeAlias

from pydantic import BaseModel

from raydix.engine.api.batches import ENDPOINTS
from raydix.engine.api.responses import Json
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.validation import BodyRules
from raydix.engine.api.wire import OPENAI, WireFormat
from raydix.engine.core.errors import AuthenticationError, PermissionDeniedError, RaydixError

Parse: TypeAlias = Callable[[bytes, BodyRules], GenerationSpec]
"""Makes a valid request of a body. Raises RequestError naming the field at fault."""

_IN_PATH = re.compile(r"{(\w+)(:path)?}")  # a parameter in a route's path, in Starlette's form


class Access(Enum):
    """Clients that a route answers where there are tenants."""

    EVERYBODY = "everybody"
    """No key is needed."""
    TENANTS = "tenants"
    ADMINISTRATORS = "administrators"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a route beside those of its path."""

    name: str
    place: Literal["query", "header"]
    description: str
    values: tuple[str, ...] | None = None
    """The values that it takes; None: any text."""

    def object(self) -> Json:
        """OpenAPI's parameter object."""
        schema: Json = {"type": "string"}
        if self.values is not None:
            schema["enum"] = list(self.values)
        return {"name": self.name, "in": self.place, "description": self.description, "schema": schema}


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One method of one path."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    """Path in Starlette's form: `{name}` is a parameter, `{name:path}` one that may have slashes."""
    name: str
    """Short name, by which `raydix.engine.api.routes.parse` finds the parser, too."""
    sentence: str
    """Description; its first sentence is the summary."""
    _: KW_ONLY
    operation: str = ""
    """Name in OpenAPI's `operationId`, where `name` is another."""
    access: Access = Access.TENANTS
    parse: Parse | None = None
    """Parser of a body with a prompt."""
    body: type[BaseModel] | None = None
    form: type[BaseModel] | None = None
    """A body that is a form."""
    response: type[BaseModel] | str | None = None
    """Model of a JSON response, or the media type of another one; None: only `events`."""
    events: type[BaseModel] | None = None
    """Data of server-sent events."""
    ends_with_done: bool = False
    """The last event is `[DONE]`."""
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[type[RaydixError], ...] = ()
    """Kinds of errors besides those that any route may have."""
    wire: WireFormat = OPENAI
    """Form of the errors."""
    is_answer: bool = False
    """A model answers: the request has a name, a session and objectives, and is recorded where requests are."""
    is_probe: bool = False
    """Load balancers ask here for the state of a replica, so that a ServiceError is an answer and no refusal."""

    @property
    def shown_path(self) -> str:
        """The path in OpenAPI's form."""
        return _IN_PATH.sub(r"{\1}", self.path)

    @property
    def path_parameters(self) -> list[str]:
        """Names of the parameters in the path, in their order."""
        return [match[1] for match in _IN_PATH.finditer(self.path)]

    @property
    def has_limit(self) -> bool:
        """True if a request counts among its tenant's requests under way."""
        return self.is_answer or self.parse is not None

    @property
    def is_batchable(self) -> bool:
        """True if the lines of a batch may be bodies of the route."""
        return self.path in ENDPOINTS

    @property
    def all_errors(self) -> tuple[type[RaydixError], ...]:
        """Kinds of errors that a client may get, without faults of raydix."""
        key_errors = () if self.access is Access.EVERYBODY else (AuthenticationError,)
        return tuple(dict.fromkeys((*key_errors, PermissionDeniedError, *self.errors)))

    @property
    def models(self) -> list[type[BaseModel]]:
        kinds = (self.body, self.form, self.response, self.events, self.wire.error)
        return [each for each in kinds if isinstance(each, type)]
