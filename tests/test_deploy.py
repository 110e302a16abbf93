from pathlib import Path
from urllib.parse import urlsplit

import yaml

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.training.algorithms import TrainingRecipe
from tests.sampling.fakes import ROOT

DEPLOY = ROOT / "deploy"


def test_the_recipes_fit_the_servers_of_the_compose_file(tmp_path):
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    files = [f"data.{name}={tmp_path}/{name}.jsonl" for name in ("questions", "corpus")]
    for file in files:
        Path(file.split("=")[1]).touch()
    sampling = load_recipe(str(DEPLOY / "served.yaml"), SamplingRecipe, files)
    training = load_recipe(str(DEPLOY / "served-grpo.yaml"), TrainingRecipe, ())
    hosts = {urlsplit(url).hostname for url in (*sampling.retriever.urls, *sampling.policy.urls)}
    assert hosts == set(services) - {"trainer"}
    assert training.served
    assert f"--max-lora-rank {training.lora.r}" in services["policy"]["command"]
    assert f"--name {sampling.policy.model} " in services["policy"]["command"]
    assert services["policy"]["command"].split()[3] == training.init_from
    assert all(name in services["trainer"]["command"][2] for name in ("deploy/served.yaml", "deploy/served-grpo.yaml"))
    # the containers share the folder with the adapters
    assert services["policy"]["volumes"] == services["trainer"]["volumes"]
    assert services["policy"]["environment"] == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
