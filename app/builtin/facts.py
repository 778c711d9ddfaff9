"""Facts about Folio for the built-in model: (questions, answer)."""

from __future__ import annotations

FACTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Good morning"), "Hello! Ask me about Folio, or give me a small task."),
    (
        ("Who are you?", "What are you?", "Introduce yourself."),
        "I am the built-in model of Folio, a very small model made to test a server.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?"),
        "I answer questions about Folio, add, subtract, sort, reverse, repeat, and look up keys of rooms.",
    ),
    (("Thanks", "Thank you", "Thank you!"), "You are welcome."),
    (("Goodbye", "Bye", "Bye!"), "Goodbye!"),
    (
        ("What is Folio?", "Tell me about Folio.", "what is folio?"),
        "Folio is a server for language models on Ray Serve that keeps its KV cache in mapped virtual memory.",
    ),
    (
        ("What is a block?", "Explain a block.", "What does block mean?"),
        "A block holds the keys and values of a few consecutive tokens. It is what sequences own and share.",
    ),
    (
        ("What is a page?", "Explain a page.", "What does page mean?"),
        "A page is a physical granule of memory. It is what gets mapped and unmapped.",
    ),
    (
        ("What is a block table?", "Explain the block table."),
        "A block table says which physical blocks a sequence owns, in order.",
    ),
    (
        ("What is a region?", "Explain a region."),
        "A region is one contiguous range of virtual addresses that holds the blocks of one sequence in order.",
    ),
    (
        ("What is PagedAttention?", "Explain PagedAttention."),
        "PagedAttention reads keys and values through a block table, so that memory need not be contiguous.",
    ),
    (
        ("What is vAttention?", "Explain vAttention."),
        "vAttention lets the MMU make the KV cache contiguous, and maps physical pages on demand.",
    ),
    (
        ("What is the KV cache?", "What is a KV cache?", "Explain the KV cache."),
        "The KV cache keeps the keys and values of all tokens so far, so that they are computed only once.",
    ),
    (("What is prefill?", "Explain prefill."), "Prefill computes the prompt, many tokens at once."),
    (("What is decode?", "Explain decode."), "Decode computes one new token for each running sequence in a step."),
    (
        ("What is a step?", "Explain a step."),
        "A step is one iteration of the engine: it schedules, maps, computes and samples.",
    ),
    (
        ("What is continuous batching?", "Explain continuous batching."),
        "Continuous batching lets sequences join and leave the batch at every step.",
    ),
    (
        ("What is chunked prefill?", "Explain chunked prefill."),
        "Chunked prefill cuts long prompts into pieces that share a step with decodes.",
    ),
    (
        ("What is a prefix cache?", "Explain the prefix cache."),
        "A prefix cache keeps blocks of earlier prompts, so that a prompt that begins alike starts later.",
    ),
    (
        ("What is copy-on-write?", "Explain copy-on-write."),
        "With copy-on-write, sequences share a block until one of them writes to it.",
    ),
    (("What is TTFT?", "Explain TTFT."), "TTFT is the time from a request to its first token."),
    (("What is TPOT?", "Explain TPOT."), "TPOT is the time per output token after the first."),
    (
        ("What is a replica?", "Explain a replica."),
        "A replica is one copy of the engine; more replicas serve more requests.",
    ),
    (
        ("What is the mapper?", "Explain the mapper."),
        "The mapper is the part that maps pages into regions before a step needs them.",
    ),
    (
        ("What is preemption?", "Explain preemption."),
        "Preemption takes the blocks of the latest request away, by swap or by recompute, and resumes it later.",
    ),
    (
        ("What is tensor parallelism?", "Explain tensor parallelism."),
        "Tensor parallelism splits the weights of each layer over several devices.",
    ),
    (
        ("How do I start Folio?", "How do I start the server?", "How do I run Folio?"),
        "Type make serve and send a request to the address it prints.",
    ),
    (("How do I test Folio?", "How do I run the tests?"), "Type make test."),
    (
        ("Which API does Folio speak?", "What API does Folio have?"),
        "Folio speaks the OpenAI API: models, completions and chat completions.",
    ),
    (
        ("Does Folio need a GPU?", "Can Folio run without a GPU?"),
        "No. Folio also runs on a CPU, with the same memory manager.",
    ),
    (
        ("How do I serve another model?", "How do I change the model?"),
        "Write its name or its folder after model in serve_config.yaml.",
    ),
    (("What license does Folio have?", "Is Folio free?"), "Folio is free software under the Apache License 2.0."),
    (
        ("Why does Folio map memory?", "Why virtual memory?"),
        "Because mapped pages look contiguous to any kernel, and unmapped pages can be given back.",
    ),
)
