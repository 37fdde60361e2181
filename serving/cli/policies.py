"""`kvjax policies`: the names of policies, which every --policy and --prefill takes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvjax.registry import DECODE_FORMS, PREFILL_FORMS, forms_of


def policies_command(
    name: Annotated[str | None, typer.Argument(help="Say what this one reads, or what is wrong with it.", show_default=False)] = None,
) -> None:
    """List the names of policies, for --policy and for --prefill; or say what one of them reads."""
    if name is None:
        for title, forms in (
            ("--policy: what a decode step reads", DECODE_FORMS),
            ("--prefill: what a prompt's queries read", PREFILL_FORMS),
        ):
            typer.echo("\n".join((title, *(f"  {form}" for form in forms_of(forms)), "")))
        typer.echo("The default is dense, and tokens:K, as trained, for models with an indexer of tokens. docs/policies.md explains each.")
        return
    from kvjax.policies.decode import parse
    from kvjax.policies.prefill import parse_prefill

    found, errors = [], []
    for option, read in (("--policy", parse), ("--prefill", parse_prefill)):
        try:
            found.append(f"{option} {name}: {read(name).describe()}")
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    typer.echo("\n".join(found))
