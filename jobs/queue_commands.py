"""The command that tells autoscalers where to look: queue-keys."""

import click

from jobs import ledger_scripts, settings


@click.command("queue-keys")
def queue_keys() -> None:
    """Print the Redis keys whose sizes are the depth: one hash of open steps of jobs, and one for each model.

    HLEN of these is what an autoscaler follows; it is 0 only when nothing is left to do. A model's key
    changes with what determines its weights (source, revision, dtype, quantisation). The settings are read
    from the environment; neither Redis nor the store is asked.

    \b
    LONGHAUL_MODELS='{"smol": {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}}' longhaul queue-keys
    """
    configured = settings.Settings.load()
    keys = ledger_scripts.Keys(configured.namespace)
    click.echo(keys.name("control"))
    for fingerprint in configured.fingerprints.values():
        click.echo(keys.name("requests", fingerprint))
