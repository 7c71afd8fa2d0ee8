"""The guessing game of many turns, with a loss that the recipe's command line does not offer.

python guess_number.py LOG_DIRECTORY
"""

# pyright: reportMissingImports=false
# Runs in the cookbook's environment.

import asyncio
import sys

import chz
from tinker_cookbook.recipes.multiplayer_rl.guess_number.train import CLIConfig, build_config
from tinker_cookbook.rl import train

SETTINGS = CLIConfig(
    log_path=sys.argv[1], batch_size=2, group_size=3, max_tokens=10, max_steps=2, eval_every=0
)


async def main() -> None:
    config = chz.replace(build_config(SETTINGS), loss_fn="stable_reinforce")
    await train.main(config)


asyncio.run(main())
