"""Internal prefill checkpoints for Mamba-style prefix caching on Kimi Delta Attention."""

__version__ = "0.1.0"

# Public names and the modules they live in; imported on first use, so that `import kda_ckpt` is quick.
_PUBLIC = {
    "LLM": "engine",
    "SamplingParams": "engine",
    "ModelConfig": "layers",
    "get_preset": "model",
    "get_backend": "backends",
    "MambaSpec": "spec",
    "Checkpoint": "spec",
    "KVCacheManager": "manager",
    "Scheduler": "scheduler",
    "KDAMetadataBuilder": "metadata",
    "TTFTConfig": "ttft",
    "run_ttft": "ttft",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(f"kda_ckpt.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'kda_ckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
