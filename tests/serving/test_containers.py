"""The container and the Kubernetes example start the command as it is."""

from __future__ import annotations

import json
import pathlib
import re

import yaml
from starlette.testclient import TestClient

from rosetta_t5.cli import command
from rosetta_t5.serving.app import Application
from rosetta_t5.serving.endpoints import Limits

_ROOT = pathlib.Path(__file__).parents[2]


def test_the_deployment_and_the_image_give_the_command_options_that_it_has():
  deployment, service = yaml.safe_load_all((_ROOT / "docker/kubernetes_serving.yaml").read_text())
  pod = deployment["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  entry = re.search(
    r"^ENTRYPOINT (\[.*serve.*\])$", (_ROOT / "Dockerfile").read_text(), re.MULTILINE
  )
  program, *arguments = json.loads(entry[1])
  assert program == "rosetta-t5"
  options = command.parse([*arguments, *container["args"]])
  assert options.host == "0.0.0.0"
  assert options.timeout_s < pod["terminationGracePeriodSeconds"]
  (port,) = container["ports"]
  assert port["containerPort"] == options.port
  assert service["spec"]["ports"][0]["targetPort"] == port["name"]
  with TestClient(Application({}, Limits(1, 1, 1, 1))) as client:
    for name in ("startup", "readiness", "liveness"):
      assert client.get(container[f"{name}Probe"]["httpGet"]["path"]).status_code == 200
