PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test study policy

demo: $(VENV)/installed  ## GRPO, IBPO and IBPO-lean side by side: a table, a picture and a repair
	$(RUN) ibpo_minimal.py --compare

test: $(VENV)/installed-dev  ## the linter and every test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest

study: $(VENV)/installed  ## the README's measured comparison (hours; stop and go on at will)
	$(RUN) -m toy_tasks.study

policy: $(VENV)/installed  ## train the shipped warm start again
	$(RUN) -m toy_tasks.policy --ship

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
