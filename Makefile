# `make demo` and `make test` set up all that they need; `make help` lists the other targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test check fuzz soak cluster cluster-stop kubernetes kubernetes-stop airflow airflow-stop venv airflow-venv torch-venv stores-venv object-store jars clean package

PYTHON_VENV := .venv/bin/python
# The JDK that setup.sh found, for Spark and Maven alike; read when a recipe runs, since setup.sh may just have installed it.
WITH_JAVA = export JAVA_HOME="$$(scripts/setup.sh java-home)";

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

demo: venv ## web log and images: ETL, training on two ranks, evaluation, report (under 4 minutes)
	@$(WITH_JAVA) $(PYTHON_VENV) -m lockstep pipeline --config conf/demo_weblog.toml conf/demo_images.toml

test: venv airflow-venv torch-venv stores-venv jars ## all checks, and all tests but the soak ones, on a real HDFS and YARN too (40 to 60 minutes)
	@scripts/setup.sh servers
	@$(MAKE) --no-print-directory -j 2 lint spark-archive
	@$(WITH_JAVA) $(PYTHON_VENV) -m pytest -n 3 --max-worker-restart 0 --dist loadscope --no-loadscope-reorder

check: venv stores-venv lint ## checks, and the tests that start no process (under 3 minutes)
	@$(WITH_JAVA) $(PYTHON_VENV) -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder -m "not slow and not cluster"

.fuzz/packages/.stamp: requirements-fuzz.txt | venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check --upgrade --target .fuzz/packages -r requirements-fuzz.txt
	@touch $@

fuzz: venv .fuzz/packages/.stamp ## fuzz each reader of foreign bytes with atheris for two minutes, with limits on time and memory
	@PYTHONPATH=.fuzz/packages $(PYTHON_VENV) -m tests.fuzz

soak: venv airflow-venv torch-venv stores-venv jars ## long tests, 20 minutes of random faults, every supported pair of versions (hours)
	@scripts/setup.sh kerberos
	@scripts/setup.sh servers
	@scripts/setup.sh kubernetes
	@$(WITH_JAVA) $(PYTHON_VENV) -m tests.soak

# Run in parallel with lint: each keeps one core busy for half a minute the first time.
.PHONY: spark-archive
spark-archive: venv
	@$(WITH_JAVA) $(PYTHON_VENV) -m tests.spark.archive

.PHONY: lint
lint: venv ## ruff and its format, mypy, import-linter
	@.venv/bin/ruff check --quiet .
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/mypy --no-error-summary
	@output=$$(.venv/bin/lint-imports --no-logo 2>&1) || { echo "$$output"; exit 1; }

.package/packages/.stamp: requirements-package.txt | venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check --upgrade --target .package/packages -r requirements-package.txt
	@touch $@

package: venv .package/packages/.stamp ## dist/: the code as a zip, Python with all packages as archives for YARN (URL=hdfs://... uploads them)
	@PATH="$(CURDIR)/.package/packages/bin:$$PATH" PYTHONPATH=.package/packages $(PYTHON_VENV) -m lockstep package $(if $(URL),--upload $(URL)) $(if $(ARCHIVES),--archives $(ARCHIVES))

.PHONY: site
site: venv ## .site/html: the pages as a site with a search and a reference; a dead link or heading fails
	@$(WITH_JAVA) $(PYTHON_VENV) -m scripts.site

.PHONY: release
release: venv ## dist/: wheel, sdist and notes, tried in an empty environment; a commit and a tag [VERSION=X.Y.Z]; uploads nothing
	@$(WITH_JAVA) $(PYTHON_VENV) -m scripts.release $(VERSION)

cluster: venv jars ## start NameNode, two DataNodes, ResourceManager and NodeManager, and print how to use them
	@$(WITH_JAVA) $(PYTHON_VENV) -m tests.cluster up

cluster-stop: venv ## stop these five processes
	@$(PYTHON_VENV) -m tests.cluster down

kubernetes: venv ## start a control plane of Kubernetes with a stand-in for its kubelets, and print how to use it
	@scripts/setup.sh kubernetes
	@$(WITH_JAVA) $(PYTHON_VENV) -m tests.kubernetes up

kubernetes-stop: venv ## stop it
	@$(PYTHON_VENV) -m tests.kubernetes down

airflow: venv airflow-venv ## start Airflow with the daily DAGs on the cluster of `make cluster`, and print how to use it
	@$(WITH_JAVA) $(PYTHON_VENV) -m tests.dags up

airflow-stop: venv ## stop its three processes
	@$(PYTHON_VENV) -m tests.dags down

venv: ## .venv with the versions of constraints.txt, and a JDK if there is none
	@scripts/setup.sh venv

airflow-venv: ## .venv-airflow, for the DAG's test and Airflow itself
	@scripts/setup.sh airflow

torch-venv: venv ## .venv-torch, PyTorch for CPUs on top of .venv, for tests of PyTorch's scripts
	@scripts/setup.sh torch

stores-venv: ## .venv-stores, moto's S3 and Node.js, for tests of object stores
	@scripts/setup.sh stores

object-store: venv stores-venv ## an S3 on this machine until Ctrl-C, and how to use it (SERVER=ceph or azure: another one)
	@$(if $(SERVER),scripts/setup.sh servers)
	@$(PYTHON_VENV) -m tests.object_stores $(SERVER)

jars: venv
	@$(WITH_JAVA) scripts/setup.sh jars

clean: ## delete results and caches, but not the environments
	@rm -rf .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
