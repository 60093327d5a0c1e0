"""report.html of a run folder: one self-contained page, made anew from the files of the run alone."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from pathlib import Path
from statistics import mean

from .config import tomllib
from .disk import write_png, write_whole

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #dde3e9; --ground: #fff; --card: #f6f8fa; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6ebf0; --soft: #9aa7b4; --line: #333d47; --ground: #14191f; --card: #1d242c; }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); }}
body {{ max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin: 0; }} h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .6rem; }}
p.sub {{ color: var(--soft); margin: .2rem 0 1.2rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }} th {{ color: var(--soft); font-weight: 600; }}
.pair {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 1.2rem; }}
figure {{ margin: 0; }} figcaption {{ color: var(--soft); font-size: .9rem; margin: .3rem 0; }}
img {{ width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; background: #fff; }}
ul.alarms {{ border-left: 4px solid #c62828; padding-left: 1.6rem; }}
pre {{ background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .8rem; }}
pre {{ overflow-x: auto; font-size: .85rem; }}
</style></head><body>
<h1>{title}</h1><p class="sub">{subtitle}</p>
{body}
</body></html>
"""


def read_rows(path: Path) -> list[dict]:
    """Rows of a .jsonl file, NaN where they have null; an unfinished last line is left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(_with_nan(json.loads(line)))
            except json.JSONDecodeError:
                continue
    return rows


def _with_nan(value):
    if isinstance(value, dict):
        return {k: _with_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_nan(v) for v in value]
    return math.nan if value is None else value


def write_report(run: Path) -> Path:
    """Write plots/*.png and report.html into a run folder; returns the page's path."""
    metrics, evals = read_rows(run / "metrics.jsonl"), read_rows(run / "evals.jsonl")
    config = (run / "config.toml").read_text(encoding="utf-8")
    plots = draw_plots(run / "plots", metrics, evals)
    first, last = evals[0], evals[-1]
    best = best_of(evals, tomllib.loads(config).get("alarms", {}).get("stop", False))
    parts = _alarms(evals)
    parts += [
        "<h2>Evaluation: deterministic ODE samples, fixed prompts and seeds</h2>",
        _score_table(first, best, last),
    ]
    if best is first and last is not first:
        parts.append("<p>No evaluation was better than the one at the start, so there is no best.safetensors.</p>")
    parts.append('<h2>Before and after, same prompts and noise</h2><div class="pair">')
    parts.append(_figure(run / "samples" / f"{first['iteration']:05d}.png", "before"))
    after = f"after {last['iteration']} iterations"
    parts.append(_figure(run / "samples" / f"{last['iteration']:05d}.png", after))
    draw_before_after(
        run / "samples" / f"{first['iteration']:05d}.png",
        run / "samples" / f"{last['iteration']:05d}.png",
        after,
        run / "before_after.png",
    )
    parts.append("</div><h2>Training</h2>")
    parts.append('<div class="pair">' + "".join(_figure(path, caption) for path, caption in plots) + "</div>")
    middle = [e["iteration"] for e in evals[1:-1]]
    if middle:
        parts.append('<h2>Along the way</h2><div class="pair">')
        parts += [_figure(run / "samples" / f"{i:05d}.png", f"after {i} iterations") for i in middle]
        parts.append("</div>")
    noisy = run / "samples" / f"{last['iteration']:05d}_rollout.png"
    if noisy.exists():
        parts.append("<h2>Training images of the last iteration</h2>")
        parts.append(
            '<p class="sub">These carry the noise that the SDE injects for exploration; that is not damage. '
            'Judge the model by the ODE samples above.</p><div class="pair">'
        )
        parts.append(_figure(noisy, "rollout images"))
        parts.append("</div>")
    if metrics:
        parts.append("<h2>Time</h2>" + _seconds_table(metrics))
    parts.append(f"<h2>Settings</h2><pre>{html.escape(config)}</pre>")
    title = f"Stepwise-Flow-GRPO: {run.resolve().name}"
    subtitle = f"{len(metrics)} iterations; numbers in metrics.jsonl and evals.jsonl beside this page"
    page = PAGE.format(title=html.escape(title), subtitle=html.escape(subtitle), body="\n".join(parts))
    path = run / "report.html"
    write_whole(path, page)
    return path


def best_of(evals: list[dict], stop: bool) -> dict:
    """The evaluation that best.safetensors is of, or the first where none was better: the first of equal ones.

    stop: whether an alarm ends the run (alarms.stop), which keeps the evaluation that gave it from being the best.
    """
    candidates = [evals[0], *(e for e in evals[1:] if not (stop and e.get("alarms")))]
    return max(candidates, key=lambda e: total if not math.isnan(total := e["scores"]["total"]) else -math.inf)


def _alarms(evals: list[dict]) -> list[str]:
    """What the alarms said, evaluation by evaluation; nothing where none was given."""
    words = [
        f"<li>after iteration {e['iteration']}: {html.escape(alarm['words'])}</li>"
        for e in evals
        for alarm in e.get("alarms", ())
    ]
    if not words:
        return []
    return [
        "<h2>Alarms</h2>",
        '<p class="sub">The reward may be hacked from here on: compare the samples with those at the start, and choose '
        "an earlier LoRA where they are worse.</p>",
        f'<ul class="alarms">{"".join(words)}</ul>',
    ]


def draw_before_after(before: Path, after: Path, caption: str, out: Path) -> None:
    """Two grids side by side under their names, one picture to pass on."""
    from PIL import Image, ImageDraw, ImageFont

    left, right = Image.open(before), Image.open(after)
    head, gap = 30, 24
    sheet = Image.new("RGB", (left.width + gap + right.width, head + max(left.height, right.height)), "white")
    sheet.paste(left, (0, head))
    sheet.paste(right, (left.width + gap, head))
    draw = ImageDraw.Draw(sheet)
    draw.font = ImageFont.load_default(size=18)
    draw.text((6, 6), "before", fill="black")
    draw.text((left.width + gap + 6, 6), caption, fill="black")
    write_png(out, sheet)


def _figure(path: Path, caption: str) -> str:
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def _score_table(first: dict, best: dict, last: dict) -> str:
    highest = "the start" if best is first else f"iteration {best['iteration']}"
    rows = [
        f"<table><tr><th>score</th><th>images</th><th>before</th><th>best ({highest})</th>"
        f"<th>end (iteration {last['iteration']})</th><th>change</th></tr>"
    ]
    names = list(first["scores"])
    # One reward of weight 1 makes the total a repetition of it.
    others = [n for n in names if n.split("/")[0] != "total"]
    same = {n.split("/")[0] for n in others}
    if len(same) == 1 and all(
        first["scores"][n] == first["scores"]["/".join(["total", *n.split("/")[1:]])] for n in others
    ):
        names = others
    for name in names:
        a, b, c = (e["scores"].get(name, math.nan) for e in (first, best, last))
        rows.append(
            f"<tr><td>{html.escape(name)}</td><td>{first['counts'][name]}</td><td>{a:.3f}</td><td>{b:.3f}</td>"
            f"<td>{c:.3f}</td><td>{c - a:+.3f}</td></tr>"
        )
    return "\n".join(rows) + "</table>"


def _seconds_table(metrics: list[dict]) -> str:
    names = [k for k in metrics[0] if k.startswith("seconds/")]
    rows = "".join(
        f"<tr><td>{html.escape(n.removeprefix('seconds/'))}</td><td>{mean(m[n] for m in metrics):.2f}</td></tr>"
        for n in names
    )
    return f"<table><tr><th>phase</th><th>seconds an iteration</th></tr>{rows}</table>"


def draw_plots(folder: Path, metrics: list[dict], evals: list[dict]) -> list[tuple[Path, str]]:
    """Draw the plots of a run; returns (file, caption) of each."""
    from matplotlib.figure import Figure

    folder.mkdir(exist_ok=True)
    out = []

    def save(figure: Figure, name: str, caption: str) -> None:
        path = folder / f"{name}.png"
        figure.tight_layout()
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=110)
        write_whole(path, data.getvalue())
        out.append((path, caption))

    def axes(ylabel: str):
        figure = Figure(figsize=(6, 3.6))
        ax = figure.subplots()
        ax.set_xlabel("iteration")
        ax.set_ylabel(ylabel)
        ax.grid(alpha=0.25)
        return figure, ax

    x = [m["iteration"] + 1 for m in metrics]
    figure, ax = axes("score")
    if metrics:
        reward = [m["reward"] for m in metrics]
        ax.plot(x, reward, color="0.7", lw=1, label="trained reward, SDE rollouts")
        ax.plot(x, smooth(reward), color="C0", lw=2, label="the same, smoothed")
    for n, name in enumerate(k for k in evals[0]["scores"] if "/" not in k):
        if name != "total" or len([k for k in evals[0]["scores"] if "/" not in k]) > 2:
            points = [(e["iteration"], e["scores"][name]) for e in evals if name in e["scores"]]
            ax.plot(*zip(*points, strict=True), "o-", color=f"C{n + 1}", label=f"eval: {name}")
    mark_alarms(ax, evals)
    ax.legend(fontsize=8)
    save(figure, "reward", "reward")
    tags = sorted(k for k in evals[0]["scores"] if k.startswith("total/"))
    if tags:
        figure, ax = axes("eval total by tag")
        for name in tags:
            points = [(e["iteration"], e["scores"][name]) for e in evals if name in e["scores"]]
            ax.plot(*zip(*points, strict=True), "o-", label=name.removeprefix("total/"))
        ax.legend(fontsize=8)
        save(figure, "tags", "evaluation by tag")
    if metrics and "gain" in metrics[0]:
        figure = Figure(figsize=(6, 3.6))
        ax = figure.subplots()
        shown = metrics[-20:]
        steps = range(len(shown[0]["gain"]))
        ax.bar([k - 0.2 for k in steps], [mean(m["gain"][k] for m in shown) for k in steps], 0.4, label="mean gain")
        size = [mean(m["gain_abs"][k] for m in shown) for k in steps]
        ax.bar([k + 0.2 for k in steps], size, 0.4, label="mean |gain|")
        ax.set_xlabel("denoising step, from noise to image")
        ax.set_xticks(list(steps))
        ax.set_ylabel("gain in reward")
        ax.grid(alpha=0.25, axis="y")
        ax.legend(fontsize=8)
        save(figure, "gains", f"gain of each step, last {len(shown)} iterations")
    if metrics:
        figure, ax = axes("gradient norm")
        ax.plot(x, [m["grad_norm"] for m in metrics], color="C3", label="gradient norm")
        other = ax.twinx()
        other.plot(x, [m["clipped"] for m in metrics], color="C4", lw=1, label="clipped share")
        if "kl" in metrics[0]:
            other.plot(x, [m.get("kl", math.nan) for m in metrics], color="C5", lw=1, label="KL")
        other.plot(x, [m["ratio/max"] - 1 for m in metrics], color="C6", lw=1, label="largest ratio - 1")
        other.plot(x, [m["dead_groups"] for m in metrics], color="0.5", lw=1, ls=":", label="groups without signal")
        other.set_ylabel("share, count")
        lines = ax.get_lines() + other.get_lines()
        ax.legend(lines, [line.get_label() for line in lines], fontsize=8)
        save(figure, "update", "update")
        figure, ax = axes("relative to the start")
        for n, name in enumerate(("brightness", "sharpness", "diversity")):
            base = metrics[0][name] or 1.0
            ax.plot(x, smooth([m[name] / base for m in metrics]), color=f"C{n}", label=name)
            if "looks" in evals[0]:
                base = evals[0]["looks"][name] or 1.0
                looks = [e["looks"][name] / base for e in evals]
                ax.plot([e["iteration"] for e in evals], looks, "o", color=f"C{n}", label=f"eval: {name}")
        ax.axhline(1, color="0.6", lw=1)
        mark_alarms(ax, evals)
        ax.legend(fontsize=8)
        save(figure, "look", "how the images look: a sharp fall beside a rising reward is a sign of reward hacking")
    return out


def mark_alarms(ax, evals: list[dict]) -> None:
    """A dashed line at each evaluation with an alarm, the first with the names of all that was ever wrong."""
    marked = [e for e in evals if e.get("alarms")]
    names = list(dict.fromkeys(alarm["name"] for e in marked for alarm in e["alarms"]))
    for n, e in enumerate(marked):
        label = f"alarm: {', '.join(names)}" if n == 0 else None
        ax.axvline(e["iteration"], color="black", lw=1.2, ls="--", label=label)


def smooth(values: list[float], share: float = 0.15) -> list[float]:
    """Exponential moving average, corrected for its start."""
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, weight = (1 - share) * mean + share * value, (1 - share) * weight + share
        out.append(mean / weight if weight else math.nan)
    return out
