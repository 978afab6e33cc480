"""Text out of the columns of a record, by a format string (`{question}`) or by Jinja (`{{ question }}`)."""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from grasp.errors import CorpusError
from grasp.extras import require

FAILURES = (KeyError, IndexError, AttributeError, TypeError, ValueError)


class Template:
    """A template that is sound.

    Args:
        text: Jinja where it has `{{` or `{%`, else a format string.
        where: the setting that holds it, for messages.
    Raises:
        CorpusError: it is neither.
    """

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where, self._jinja = text, where, None
        if "{{" in text or "{%" in text:
            jinja = require("jinja2", extra="chat", feature=f"{where}, which is a Jinja template")
            sandbox = require("jinja2.sandbox", extra="chat", feature=where)
            environment = sandbox.ImmutableSandboxedEnvironment(
                undefined=jinja.StrictUndefined, keep_trailing_newline=True
            )
            self._failures: tuple[type[Exception], ...] = (*FAILURES, jinja.TemplateError)
            try:
                self._jinja = environment.from_string(text)
                self.columns = frozenset(
                    require("jinja2.meta", extra="chat", feature=where).find_undeclared_variables(
                        environment.parse(text)
                    )
                )
            except jinja.TemplateError as err:
                raise CorpusError(f"{where}: {text!r} is no Jinja template: {err}") from err
        else:
            self._failures = FAILURES
            self.columns = _columns(text, where)

    def fill(self, record: Mapping[str, Any], where: str) -> str:
        """The text of a record.

        Raises:
            CorpusError: it does not fit.
        """
        try:
            return str(self._jinja.render(record)) if self._jinja else self._text.format(**record)
        except self._failures as err:
            raise CorpusError(f"{where}: does not fit {self._where}: {err!r}") from err


def _columns(text: str, where: str) -> frozenset[str]:
    """Columns that a format string reads: ``{answers[text][0]}`` reads `answers`."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(text) if field is not None]
    except ValueError as err:
        raise CorpusError(f"{where}: {text!r} is no format string: {err}") from err
    roots = {re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields}
    if "" in roots or any(root.isdigit() for root in roots):
        raise CorpusError(f"{where}: {text!r} has a field without a name, expected columns such as {{question}}")
    return frozenset(roots)
