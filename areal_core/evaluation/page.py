"""The page of an evaluation on one benchmark, where a person reads prompts, completions and verdicts.

One file without anything from elsewhere: scores on top, then the problems, which open at a click and can be filtered by
what became of their greedy completion and by any text in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from areal_core.errors import StorageError, printable_lines
from areal_core.evaluation.records import Record
from areal_core.evaluation.scores import Scores
from areal_core.types import Outcome

_SAMPLES = 8  # of a problem that are shown


def _finalized(value: object) -> object:
    """Texts with control characters and marks of writing direction as escapes; tabs stay."""
    return "\t".join(map(printable_lines, value.split("\t"))) if type(value) is str else value


_JINJA = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_finalized)
_TEMPLATE = _JINJA.from_string("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024; }
  h1 { font-size: 1.3rem; }
  table { border-collapse: collapse; margin: 1rem 0; }
  td, th { padding: .2rem 1.2rem .2rem 0; text-align: left; border-bottom: 1px solid #e4e7eb; }
  td.figure { font-variant-numeric: tabular-nums; }
  nav { position: sticky; top: 0; background: #fff; padding: .6rem 0; border-bottom: 1px solid #cbd2d9; }
  nav label { margin-right: 1rem; }
  details { border-bottom: 1px solid #e4e7eb; padding: .4rem 0; }
  summary { cursor: pointer; }
  summary small { color: #5a6572; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f7f9; padding: .6rem; margin: .4rem 0; }
  .mark { display: inline-block; min-width: 6.5rem; font-weight: 600; color: #b02a37; }
  .mark.correct { color: #1a7f37; }
  .mark.timed_out, .mark.failed { color: #8a6100; }
</style>
<h1>{{ title }}</h1>
<table>
{% for name, value in figures %}
  <tr><th>{{ name }}</th><td class="figure">{{ value }}</td></tr>
{% endfor %}
</table>
<nav>
{% for outcome in outcomes %}
  <label><input type="checkbox" value="{{ outcome }}" checked> {{ outcome | replace("_", " ") }}</label>
{% endfor %}
  <input type="search" placeholder="text" aria-label="text"> <span id="shown"></span>
</nav>
{% macro sample(name, one) %}
<p><span class="mark {{ one.outcome }}">{{ one.outcome | replace("_", " ") }}</span>
<small>{{ name }}, {{ one.tokens }} tokens{{ ", cut off" if one.truncated }}
{%- if one.answer is not none %}, read as {{ one.answer }}{% endif %}</small></p>
<pre>{{ one.text }}</pre>
{% endmacro %}
{% for record in records %}
<details data-outcome="{{ record.greedy.outcome }}">
  <summary><span class="mark {{ record.greedy.outcome }}">{{ record.greedy.outcome | replace("_", " ") }}</span>
  problem {{ record.problem }}
  <small>{% if record.samples %}{{ record.samples | selectattr("correct") | list | length }} of
  {{ record.samples | length }} samples correct{% endif %}</small></summary>
  <pre>{{ record.prompt }}</pre>
  <p><small>gold</small></p>
  <pre>{{ record.gold }}</pre>
{{ sample("greedy", record.greedy) }}
{% for one in record.samples[:most] %}
{{ sample("sample " ~ loop.index, one) }}
{% endfor %}
{% if record.samples | length > most %}
<p><small>{{ record.samples | length - most }} more samples are in the records.</small></p>
{% endif %}
</details>
{% endfor %}
<script>
  const boxes = [...document.querySelectorAll("nav input[type=checkbox]")];
  const text = document.querySelector("nav input[type=search]");
  const problems = [...document.querySelectorAll("details")];
  function show() {
    const chosen = new Set(boxes.filter(box => box.checked).map(box => box.value));
    const wanted = text.value.toLowerCase();
    let shown = 0;
    for (const one of problems) {
      one.hidden = !(chosen.has(one.dataset.outcome) && one.textContent.toLowerCase().includes(wanted));
      shown += !one.hidden;
    }
    document.getElementById("shown").textContent = `${shown} of ${problems.length}`;
  }
  for (const input of [...boxes, text]) input.addEventListener("input", show);
  show();
</script>
</html>
""")


def write_page(path: Path, title: str, records: Sequence[Record], scores: Scores) -> None:
    """Raises StorageError where the file can't be written."""
    found = {record.greedy.outcome for record in records}
    text = _TEMPLATE.render(
        title=title,
        figures=scores.rows(),
        outcomes=[outcome for outcome in Outcome if outcome in found],
        records=records,
        most=_SAMPLES,
    )
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"{path}: can't be written: {error.strerror}") from error
