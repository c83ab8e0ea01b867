"""Fields of requests for figures of many inputs: embeddings and scores."""

from pydantic import Field

from raydix.engine.api.fields import PromptFields, RequestId
from raydix.engine.api.prompts import Label
from raydix.engine.api.spec import GenerationSpec, Prompt, RetentionSpec, ServiceSpec


class InputsFields(PromptFields):
    """Fields of requests for figures of many inputs, instead of texts."""

    model: Label | None = Field(default=None, description="Name of the served model; may be left out.")
    add_special_tokens: bool | None = Field(
        default=None, description="A text gets the special tokens that the model wants around it; true."
    )
    request_id: RequestId | None = Field(
        default=None, description="Name of the request, in `id` and logs; it goes before the header `x-request-id`."
    )

    def of_inputs(self, inputs: tuple[Prompt, ...]) -> GenerationSpec:
        """Make the normal form of a request for something about each of some inputs."""
        return GenerationSpec(
            kind="completion",
            model=self.model,
            prompts=inputs,
            truncation=self.truncated_to(),
            add_special_tokens=self.add_special_tokens is not False,
            service=self.service(ServiceSpec(request_id=self.request_id)),
            retention=self.retention(RetentionSpec()),
        )
