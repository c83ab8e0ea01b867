"""Reads a `multipart/form-data` body piece by piece: a few short fields, and one file, never held as a whole."""

from collections.abc import Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from raydix.engine.core.errors import MediaTypeError, RequestError

MULTIPART = b"multipart/form-data"
MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
MAX_NAME = 255  # characters kept of a file's name
FILE = "file"


class Form:
    """One body, fed on arrival."""

    def __init__(self, content_type: str | None) -> None:
        """Raises MediaTypeError."""
        kind, options = parse_options_header(content_type)
        if kind != MULTIPART or not options.get(b"boundary"):
            raise MediaTypeError("The Content-Type must be multipart/form-data, with a boundary.")
        self.filename: str | None = None
        """Name of the file, once begun."""
        self._fields: dict[str, bytearray] = {}
        self._num_parts = 0
        self._header_name, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""  # name of the part that is arriving
        self._content: list[bytes] = []
        self._is_complete = False
        callbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._take,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise RequestError(f"The request body cannot be read: {error}.") from None

    def feed(self, part: bytes) -> bytes:
        """Take bytes of the body; returns the file's bytes among these. Raises RequestError."""
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise RequestError(f"The request body is not a valid form: {error}.") from None
        content, self._content = b"".join(self._content), []
        return content

    def fields(self) -> Mapping[str, str]:
        """The fields of a complete body. Raises RequestError."""
        if not self._is_complete:
            raise RequestError("The request body ends before the end of its form.")
        if self.filename is None:
            raise RequestError("Missing required parameter: 'file'.", param=FILE)
        try:
            return {name: value.decode() for name, value in self._fields.items()}
        except UnicodeDecodeError:
            raise RequestError("A field of the form is not valid UTF-8.") from None

    def _begin_part(self) -> None:
        # Parts are counted as they begin: each costs memory and calls, however short it is.
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise RequestError(f"The form must have at most {MAX_PARTS} parts.")
        self._disposition = b""

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name != FILE:
            if self._name in self._fields:
                raise RequestError(f"'{self._name[:64]}' is given twice.", param=self._name[:64])
            self._fields[self._name] = bytearray()
        elif self.filename is not None:
            raise RequestError("'file' is given twice.", param=FILE)
        else:
            # Some clients send a path. The name is shown and never used as one, and its end is what a person knows.
            name = options.get(b"filename", b"").decode("utf-8", "replace").rpartition("/")[2]
            self.filename = name[:MAX_NAME] or FILE

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._content.append(data[start:end])
            return
        value = self._fields[self._name]
        value += data[start:end]
        # Only the file may be large: it goes to the disk as it comes, and fields stay in memory.
        if len(value) > MAX_FIELD_BYTES:
            raise RequestError(f"'{self._name[:64]}' must have at most {MAX_FIELD_BYTES} bytes.", param=self._name[:64])

    def _end(self) -> None:
        self._is_complete = True
