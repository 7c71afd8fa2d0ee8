"""From tokens to the text in which stop strings are looked for."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from backend.generator.stopping import Decode
from together_post_training.errors import Reason, fail


def load_decoder(tokenizer_dir: Path | None) -> Decode | None:
    """The model's own decoder, as `stopping.Decode` asks for; None without a tokenizer."""
    if tokenizer_dir is None:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # The library raises no narrower one for a file that is damaged.
        raise fail(
            Reason.INCOMPATIBLE_CHECKPOINT,
            f"The tokenizer in {tokenizer_dir} cannot be read ({error}). Copy or download it again, or move its files "
            "away to send and receive token ids alone.",
            directory=tokenizer_dir,
        ) from error
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        # Ten times faster than through the wrapper; ids that have no text are skipped.
        return lambda tokens: fast.decode(list(tokens), skip_special_tokens=False)
    return lambda tokens: tokenizer.decode(
        tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
