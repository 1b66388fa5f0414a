"""The command that tells autoscalers where to look: queue-keys."""

import click

from jobs import ledger_scripts, settings


@click.command("queue-keys", short_help="Print the Redis keys that autoscalers look at.")
def queue_keys() -> None:
    """Print the Redis keys whose sizes are the depth: one hash of open steps of jobs, and one for each model.

    HLEN of these is what an autoscaler follows; it is 0 only when nothing is left to do. A model's key
    changes with what determines its weights (source, revision, dtype, quantisation), so run this with exactly
    the settings of the workers, LONGHAUL_QUANTIZE* and LONGHAUL_NAMESPACE among them: others give keys that
    stay empty. With LONGHAUL_MODEL it prints those of a worker's own models. The settings are read from
    the environment; neither Redis nor the store is asked.

    \b
    LONGHAUL_MODELS='{"smol": {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}}' longhaul queue-keys
    """
    configured = settings.Settings.load()
    names = configured.models if configured.model is None else configured.served
    keys = ledger_scripts.Keys(configured.namespace)
    click.echo(keys.name("control"))
    for name in names:
        click.echo(keys.name("requests", configured.fingerprints[name]))
    if not configured.models:
        click.echo("longhaul: LONGHAUL_MODELS is empty: no model has a key. Set it as workers do.", err=True)
