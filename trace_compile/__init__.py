"""A compiler pass pipeline that makes an NVFP4 rollout and its trainer agree. See ``trace_compile.trace_compile``."""
