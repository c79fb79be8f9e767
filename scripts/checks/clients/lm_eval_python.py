"""lm-evaluation-harness on two tasks made here: likelihoods by `local-completions`, answers by both kinds of server.

Writes every loglikelihood to FOLDER/likelihoods.json, for the comparison with the engine in process.
"""

import json
import os
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

BASE, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
FOLDER = Path(os.environ["FOLDER"])
QUESTIONS = [
    ("The capital of France is", ["Paris", "Berlin", "a large dog"], 0),
    ("The sun rises in the", ["west", "east", "refrigerator"], 1),
    ("Two plus two is", ["five", "purple", "four"], 2),
    ("Water freezes at a temperature of", ["zero degrees", "a thousand degrees"], 0),
    ("A spider has", ["eight legs", "three wheels", "no body at all"], 0),
    ("The opposite of hot is", ["warm", "cold"], 1),
]
SCORED = """\
task: corespan_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
WRITTEN = """\
task: corespan_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n", ".", ";", "!", "?", "</s>"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def evaluate(kind: str, path: str, task: str, **more: object) -> list[dict]:
    arguments = {"model": MODEL, "base_url": BASE + path, "tokenizer": os.environ["TOKENIZER"], "num_concurrent": 4}
    arguments |= {"max_retries": 1, "max_length": 2048, **more}
    results = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER)),
        apply_chat_template=kind == "local-chat-completions",
        log_samples=True,
        bootstrap_iters=0,
    )
    return results["samples"][task]


os.environ.setdefault("OPENAI_API_KEY", "EMPTY")
data = FOLDER / "questions.jsonl"
rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS]
data.write_text("".join(json.dumps(row) + "\n" for row in rows))
(FOLDER / "choices.yaml").write_text(SCORED.format(data=data))
(FOLDER / "answers.yaml").write_text(WRITTEN.format(data=data))

likelihoods = []
for more in ({"batch_size": 4}, {"batch_size": 1, "tokenizer_backend": "remote", "tokenizer": None}):
    samples = evaluate("local-completions", "/v1/completions", "corespan_choices", **more)
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        for arguments, (scored,) in zip(sample["arguments"], sample["resps"], strict=True):
            likelihoods.append(
                {"context": arguments[0], "continuation": arguments[1], "loglikelihood": float(scored[0])}
            )
(FOLDER / "likelihoods.json").write_text(json.dumps(likelihoods))

for kind, path in (("local-completions", "/v1/completions"), ("local-chat-completions", "/v1/chat/completions")):
    samples = evaluate(kind, path, "corespan_answers")
    assert len(samples) == len(QUESTIONS) and all(sample["resps"][0][0] for sample in samples), kind
