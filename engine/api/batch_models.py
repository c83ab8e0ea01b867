"""Shapes of files and batches, for `/openapi.json`; `raydix.engine.api.batches` writes the objects."""

from typing import Literal, TypeAlias

from pydantic import Field

from raydix.engine.api.batches import Endpoint, UploadFields
from raydix.engine.api.response_models import Shape

Time: TypeAlias = int | None
StatusName: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
"""The values of `raydix.engine.core.batches.records.Status`."""


class UploadForm(UploadFields):
    """Form of `POST /v1/files`."""

    file: bytes = Field(description="Lines of JSON, a request in each.")


class FileObject(Shape):
    """A file."""

    id: str = Field(description="By which it is found again.")
    object: Literal["file"] = Field(description="Always `file`.")
    bytes: int = Field(description="Its size.")
    created_at: int = Field(description="Seconds since 1970.")
    expires_at: Time = Field(description="When it is erased; null: never.")
    filename: str = Field(description="Its name at the client.")
    purpose: Literal["batch", "batch_output"] = Field(description="Input of batches, or output of one.")
    status: Literal["processed"] = Field(description="Always `processed`.")
    status_details: None = Field(description="Always null.")


class _Page(Shape):
    """A part of a list."""

    object: Literal["list"] = Field(description="Always `list`.")
    first_id: str | None = Field(description="Id of the first object.")
    last_id: str | None = Field(description="Id of the last object: `after` of the next part.")
    has_more: bool = Field(description="Whether there is a next part.")


class MessageBatchCounts(Shape):
    """Requests of a batch of messages, by outcome."""

    processing: int = Field(description="All, until the batch has ended.")
    succeeded: int = Field(description="Answered requests.")
    errored: int = Field(description="Failed requests.")
    canceled: int = Field(description="Requests that had not run when the batch was cancelled.")
    expired: int = Field(description="Requests that had not run in time.")


class MessageBatch(Shape):
    """A batch of messages."""

    id: str = Field(description="Id of the batch.")
    type: Literal["message_batch"] = Field(description="Kind of the object.")
    processing_status: Literal["in_progress", "canceling", "ended"] = Field(description="State of the batch.")
    request_counts: MessageBatchCounts = Field(description="Requests by outcome.")
    created_at: str = Field(description="Time of the request.")
    expires_at: str = Field(description="When requests that have not run do not run any more: after a day.")
    ended_at: str | None = Field(description="Time of the end.")
    cancel_initiated_at: str | None = Field(description="When the client cancelled.")
    archived_at: None = Field(description="Always null.")
    results_url: str | None = Field(description="Address of the results, once the batch has ended.")


class MessageBatchList(Shape):
    """A page of batches of messages."""

    data: list[MessageBatch] = Field(description="Batches, the newest first.")
    first_id: str | None = Field(description="Id of the first batch.")
    last_id: str | None = Field(description="Id of the last batch.")
    has_more: bool = Field(description="True if more batches follow.")


class MessageBatchDeleted(Shape):
    """A batch of messages that was erased."""

    id: str = Field(description="Id of the batch.")
    type: Literal["message_batch_deleted"] = Field(description="Kind of the object.")


class FileList(_Page):
    """Files of one tenant."""

    data: list[FileObject] = Field(description="The newest first, unless `order` is `asc`.")


class FileDeleted(Shape):
    """The end of a file."""

    id: str = Field(description="Of the file that is erased.")
    object: Literal["file"] = Field(description="Always `file`.")
    deleted: Literal[True] = Field(description="Always true.")


class BatchError(Shape):
    """A reason why a batch failed."""

    code: str = Field(description="Kind of the error.")
    line: int | None = Field(description="Line of the input file, from 1.")
    message: str = Field(description="For people.")
    param: str | None = Field(description="Field of the line.")


class BatchErrors(Shape):
    """Why a batch failed."""

    object: Literal["list"] = Field(description="Always `list`.")
    data: list[BatchError] = Field(description="At most 100.")


class BatchRequestCounts(Shape):
    """Lines of a batch."""

    total: int = Field(description="All lines; 0 until the input is read.")
    completed: int = Field(description="Lines with an answer.")
    failed: int = Field(description="Lines with an error.")


class Batch(Shape):
    """A batch. Times are in seconds since 1970, and null until then."""

    id: str = Field(description="By which it is found again.")
    object: Literal["batch"] = Field(description="Always `batch`.")
    endpoint: Endpoint = Field(description="Route of its lines.")
    model: str = Field(description="Model of the server at which it began.")
    errors: BatchErrors | None = Field(description="Why it failed.")
    input_file_id: str = Field(description="File of its lines.")
    completion_window: str = Field(description="Time within which its lines may run.")
    status: StatusName = Field(description="How far it is.")
    output_file_id: str | None = Field(description="File of the answers, in the input's order, once it has ended.")
    error_file_id: str | None = Field(description="File of the lines that failed or did not run.")
    created_at: int = Field(description="When it began.")
    in_progress_at: Time = Field(description="When its lines began to run.")
    expires_at: int = Field(description="When lines that have not run do not run any more.")
    finalizing_at: Time = Field(description="When all lines were answered.")
    completed_at: Time = Field(description="When its output was complete.")
    failed_at: Time = Field(description="When it failed.")
    expired_at: Time = Field(description="When it ended because its time was over.")
    cancelling_at: Time = Field(description="When its client cancelled it.")
    cancelled_at: Time = Field(description="When it ended after that.")
    request_counts: BatchRequestCounts = Field(description="Its lines so far.")
    metadata: dict[str, str] | None = Field(description="As the client gave it.")


class BatchList(_Page):
    """Batches of one tenant."""

    data: list[Batch] = Field(description="The newest first, unless `order` is `asc`.")
