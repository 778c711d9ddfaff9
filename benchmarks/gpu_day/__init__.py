"""All tests and benchmarks for a CUDA machine, in stages of at most 8 minutes: `python -m benchmarks.gpu_day STAGE…`.

- *facts*: versions, rates and the driver's most mappings, chosen tests, attention, the parts of a step
- *whole*: all tests marked `gpu`, Llama-3-8B's shape with `transformers` beside it
- *graphs*: decode graphs: tokens with and without them, capture, step times
- *memory*: elastic against static, a trace, preemption
- *shelf*: weights that sleep and wake, from pinned memory and from a file; models that take turns
- *kernels*: variants of kernels, products and steps beside today's, all tests marked `gpu`, attention's footprints
- *server*: `folio serve` with Llama-3-8B's shape behind HAProxy, a replica killed; the engine without a server
- *fleet*: replicas that share a GPU and its KV memory, models that take turns, preemption, elastic against static,
  each way of using a model once

A stage is a list of jobs. Each job is a process with a time limit, at which it is killed with all its descendants, also
those in sessions of their own (`keeper`), so that a failure costs only itself. Jobs that measure time run alone, the
others side by side. Facts go to `STAGE.jsonl` as soon as they are known, all output to `STAGE.log`, Ray's logs to
`STAGE-ray.tar.gz`, in the folder that `FOLIO_RESULTS` names or in benchmarks/results/cuda. At the end there is a table,
failures first. Exit status 1 if anything failed.

--fake runs the same without a device: the driver's calls by the tests' stand-in for libcuda, kernels in Triton's
interpreter, everything else small and on the CPU. It shows that this program works, and measures nothing.

Needs torch, triton, cuda-bindings, transformers and pytest; *server* and *fleet* also Ray. Neither git nor a network.
"""
