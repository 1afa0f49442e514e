"""A pipeline's timeline as a picture in SVG."""

from __future__ import annotations

from hyper_parallel.core.pipeline_parallel import Kind, Timeline

_WIDTH, _ROW, _LEFT, _TOP = 960, 26, 64, 8
_COLOURS = {
    Kind.FORWARD: ("#cfe3ff", "forward"),
    Kind.BACKWARD: ("#c9ecd0", "backward"),
    Kind.BACKWARD_WEIGHT: ("#efe2b3", "backward of weights"),
    Kind.REDUCE_GRAD: ("#d9d9d9", "gradient reduction"),
}


def svg(timeline: Timeline) -> str:
    """One row for each pipeline rank, one box for each computation with its micro-batch; a rank's later stages have apostrophes and
    a thicker frame. Idle time is empty."""
    height = _TOP + _ROW * len(timeline.spans) + 28
    scale = (_WIDTH - _LEFT - 8) / (timeline.total or 1.0)
    title = f"pipeline schedule of {len(timeline.spans)} ranks"
    style = f'role="img" aria-label="{title}" font-family="sans-serif" font-size="10"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="100%" {style}>']
    for rank, spans in enumerate(timeline.spans):
        top = _TOP + _ROW * rank
        parts.append(f'<text x="4" y="{top + 15}" font-size="12">rank {rank}</text>')
        stages = sorted({span.step.stage for span in spans})
        for step, start, end in spans:
            width = (end - start) * scale
            if not width:
                continue
            turn = stages.index(step.stage)
            colour, name = _COLOURS[step.kind]
            text = "" if step.kind is Kind.REDUCE_GRAD else f"{step.micro_batch}{turn * chr(39)}"
            left = _LEFT + start * scale
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}" stroke="#444" '
                f'stroke-width="{0.5 + turn}"><title>{name} of micro-batch {step.micro_batch}, stage {step.stage}</title></rect>'
            )
            if width > 6 * len(text):
                parts.append(f'<text x="{left + width / 2:.1f}" y="{top + 14}" text-anchor="middle">{text}</text>')
    parts += _legend(timeline, height - 10)
    return "\n".join([*parts, "</svg>"])


def _legend(timeline: Timeline, y: int) -> list[str]:
    kinds = {span.step.kind for spans in timeline.spans for span in spans if span.end > span.start}
    parts, left = [], _LEFT
    for kind, (colour, name) in _COLOURS.items():
        if kind in kinds:
            parts.append(f'<rect x="{left}" y="{y - 9}" width="12" height="10" fill="{colour}" stroke="#444" stroke-width="0.5"/>')
            parts.append(f'<text x="{left + 16}" y="{y}">{name}</text>')
            left += 30 + 6 * len(name)
    return parts
