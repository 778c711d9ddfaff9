"""Bodies of `/v1/embeddings`, `/v1/score` and `/v1/rerank`, as OpenAI, vLLM, Jina and Cohere have them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from folio.app.api.base import ListOf, Name, StrictBody, Text, at_most
from folio.app.api.openai.bodies import kind_of_prompt
from folio.app.api.openai.sampling_body import TokenIds

# OpenAI's bound.
MAX_INPUTS = 2048

Input = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[ListOf[Text], at_most(MAX_INPUTS, "inputs"), Tag("texts")]
    | Annotated[ListOf[TokenIds], at_most(MAX_INPUTS, "inputs"), Tag("batch")],
    Discriminator(kind_of_prompt),
]


class PooledBody(StrictBody):
    """Fields that requests for embeddings and scores share."""

    model: Annotated[Text, Field(max_length=256, examples=["builtin"])]
    """The served model, or an adapter of it."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    """Cut longer inputs instead of refusing them: -1 to the model's context, k to k tokens. An input keeps its last
    tokens; of a pair that one prompt holds, the document loses its end."""
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    """Requests with a lower number are scheduled first and preempted last. 0 by default."""
    cache_salt: Name | None = None
    """Only requests with the same salt share cached prefixes."""
    tenant: Name | None = None
    """The tenant of the request: tenants share no cached prefixes (`isolate_tenants`) and are scheduled fairly
    (`fair_tenants`)."""
    timeout_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Seconds after which an unfinished request ends with an error."""
    user: Text | None = None
    """The end user. With `fair_tenants` it is also the tenant of a request that names none."""


class EmbeddingRequest(PooledBody):
    """`POST /v1/embeddings`."""

    input: Annotated[Input, Field(examples=["What is Folio?"])]
    """Text or token ids, or a list of up to 2,048 of one kind. Token ids are computed as they are, without the tokens
    that the tokenizer adds to a text."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the base64 of little-endian float32. Numbers by default."""
    dimensions: Annotated[int | None, Field(ge=1)] = None
    """Keep this number of each embedding's first components, normalised again: for models that were trained for it."""


Texts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[ListOf[Text], at_most(MAX_INPUTS, "texts"), Tag("texts")],
    Discriminator(lambda value: "texts" if isinstance(value, list) else "text"),
]


class ScoreRequest(PooledBody):
    """`POST /v1/score`."""

    text_1: Annotated[Texts, Field(examples=["What is a block?"])]
    """A text, such as a query, or a list of as many texts as `text_2` has."""
    text_2: Annotated[Texts, Field(examples=[["A block is 16 positions.", "It rains."]])]
    """The texts that are compared with it, up to 2,048."""


class Document(StrictBody):
    text: Text


class RerankRequest(PooledBody):
    """`POST /v1/rerank`."""

    query: Annotated[Text, Field(examples=["What is a block?"])]
    """The text to which the documents are to be relevant."""
    documents: Annotated[
        ListOf[
            Annotated[
                Annotated[Text, Tag("text")] | Annotated[Document, Tag("document")],
                Discriminator(lambda value: "text" if isinstance(value, str) else "document"),
            ]
        ],
        at_most(MAX_INPUTS, "documents"),
        Field(examples=[["A block is 16 positions.", "It rains."]]),
    ]
    """Up to 2,048 texts, or objects with a `text`."""
    top_n: Annotated[int | None, Field(ge=0)] = None
    """Return the best of them only; by default, and with 0, all."""
    return_documents: bool | None = None
    """Return the documents' texts. True by default."""
