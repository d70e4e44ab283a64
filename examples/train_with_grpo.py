"""Train a policy with TRL's GRPO on the reward that the selector learns from a judge meanwhile.

Run: python examples/train_with_grpo.py --model PATH   (needs the extra [trl])
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from ensemblepp.llm import EnsembleRewardModel, ResponseSelector
from ensemblepp.llm.oracles import BradleyTerryJudge
from ensemblepp.llm.trl import EnsembleReward

PROMPTS = ["Once upon a time", "One day, a little girl", "The dog was", "In the garden"]


def variety(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """What the judge likes: many different words."""
    return [float(len(set(response.split()))) for response in responses]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a causal language model")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="tokens per answer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # The reward model has a backbone of its own: the policy's weights move, and features must not move with them.
    reward_model = EnsembleRewardModel.from_backbone(options.model, pooling="mean", prior_scale=10.0)
    selector = ResponseSelector(reward_model, tokenizer, acquisition="double_thompson", seed=options.seed)
    reward = EnsembleReward(selector, sample=True, judge=BradleyTerryJudge(variety, seed=options.seed))
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=options.tokens,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            seed=options.seed,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"mean sampled reward of every step: {[round(value, 3) for value in rewards]}")
    print(f"the judge was asked {selector.learner.replay.size} questions")


if __name__ == "__main__":
    main()
