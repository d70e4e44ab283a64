"""A language model answers, the selector picks a pair, a scripted judge answers, and the head learns.

Run: python examples/select_responses.py --model PATH   (any causal language model that transformers loads)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from ensemblepp.llm import EnsembleRewardModel, ResponseSelector
from ensemblepp.llm.oracles import RuleJudge

PROMPTS = ["Once upon a time", "One day, a little girl", "The dog was", "In the garden"]


def brevity(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The scripted taste: few letters per word, and no word twice."""
    words = [response.lower().split() or [""] for response in responses]
    return [len(set(each)) / len(each) - sum(map(len, each)) / len(each) / 10 for each in words]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a causal language model")
    parser.add_argument("--answers", type=int, default=6, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=10, help="questions per prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    set_seed(options.seed)  # the generation of transformers draws from the global stream
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    language_model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            ids = language_model.generate(
                **inputs,
                do_sample=True,
                num_return_sequences=options.answers,
                max_new_tokens=options.tokens,
                pad_token_id=tokenizer.eos_token_id,
            )
        answers.append(tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    # Features of answers to one prompt are a third of a unit apart: 10 times that are about 3 logits.
    reward_model = EnsembleRewardModel.from_backbone(language_model, pooling="mean", prior_scale=10.0)
    selector = ResponseSelector(reward_model, tokenizer, acquisition="infomax", seed=options.seed)
    judge = RuleJudge(brevity)
    for turn in range(options.rounds):
        for prompt, group, (first, second) in zip(
            PROMPTS, answers, selector.select_pair(PROMPTS, answers), strict=True
        ):
            label = judge(prompt, group[first], group[second])
            selector.learn(prompt, chosen=group[first], rejected=group[second], label=label)
        scores = selector.scores(PROMPTS, answers)
        right, pairs = 0, 0
        for prompt, group, values in zip(PROMPTS, answers, scores, strict=True):
            order = torch.tensor(brevity([prompt] * len(group), group))
            differs = (order.unsqueeze(0) - order.unsqueeze(1)) > 0
            right += int((differs & (values.unsqueeze(0) > values.unsqueeze(1))).sum())
            pairs += int(differs.sum())
        print(f"after {(turn + 1) * len(PROMPTS):2d} questions: {right} of {pairs} pairs in the judge's order")
    best = selector.scores(PROMPTS[0], answers[0]).argmax()
    print(f"best answer to {PROMPTS[0]!r}: {answers[0][best]!r}")


if __name__ == "__main__":
    main()
