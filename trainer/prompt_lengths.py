"""Which prompts are longer than the text encoders read: what is beyond is cut, so that two of them may be as one."""

from __future__ import annotations

from collections.abc import Sequence

from sfgrpo.prompts import Prompt, is_blank

from .families import Family


def cut_prompts(family: Family, prompts: Sequence[Prompt], guided: bool) -> list[str]:
    """A sentence for each text encoder that cuts some of the prompts, each different text counted once.

    family: loaded with its tokenizers at least. guided: whether negative prompts are encoded too. What is counted is
    `Family.count_tokens`.
    """
    texts: dict[str, str] = {}
    for n, prompt in enumerate(prompts, start=1):
        where = prompt.where or f"prompt {n}"
        texts.setdefault(prompt.text, where)
        if guided and not is_blank(prompt.negative):
            texts.setdefault(prompt.negative, f"{where} (its negative prompt)")
    limits = family.text_limits
    return [words for name in limits if (words := _cut_by(family, name, limits, texts))]


def _cut_by(family: Family, name: str, limits: dict[str, int], texts: dict[str, str]) -> str:
    """What the encoder of one tokenizer cuts, in words, or nothing. texts: text -> where it stands."""
    limit, raised = limits[name], max(limits.values())
    lengths = {text: family.count_tokens(name, text) for text in texts}
    cut = [text for text, length in lengths.items() if length > limit]
    if not cut:
        return ""
    longest = max(cut, key=lengths.__getitem__)
    do = "shorten them"
    if family.has_raisable_limit(name) and limit < family.LONGEST:
        do += f", or raise model.max_sequence_length (to {family.LONGEST} at most)"
    elif raised > limit:
        do += f"; another encoder reads {raised} tokens, so that they are cut in part alone"
    return (
        f"{len(cut)} of {len(texts)} prompts are longer than the {limit} tokens that the encoder of {name} reads and "
        f"are cut there; the longest, {texts[longest]}, has {lengths[longest]} tokens (special and template tokens "
        f"included) and begins {longest[:60]!r}; {do}"
    )
