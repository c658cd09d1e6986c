# `make` lists the targets. Each target first runs the targets that it requires, and prints its steps.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PREFIX ?= /usr/local
FUZZ_SECONDS ?= 600
SOAK_SECONDS ?= 1800

# Rust toolchain, if the version of rust-toolchain.toml is not installed and a newer one is.
TOOLCHAIN := $(shell scripts/toolchain 2>/dev/null)
ifneq ($(TOOLCHAIN),)
export RUSTUP_TOOLCHAIN := $(TOOLCHAIN)
endif

export TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
# Directory of the programs (PROGRAMS of scripts/lib).
RELEASE := $(TARGET_DIR)/$(if $(CI),ci/programs,release)
# `make run` uses release programs if they exist. Otherwise it builds programs that compile faster.
QUICK := $(if $(CI)$(wildcard $(RELEASE)/jiffy),,yes)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: ## install missing requirements to build and run (Debian packages); check Rust
	@scripts/setup

.PHONY: build
build: ## build jiffy, jiffy-vmm, jiffy-functions, jiffy-gvisor and the guest's jiffy-agent
	@scripts/build

.PHONY: instruments
instruments: build ## build jiffy-instruments, with which scripts in bench/ measure
	@scripts/instruments

.PHONY: template
template: setup build ## build the base template (one to two minutes; once, until its recipe changes)
	@scripts/step "building the base template, unless it exists" $(RELEASE)/jiffy template build base

.PHONY: interpreter
interpreter: setup build ## build the code interpreter's template (one to two minutes; once, until its recipe changes)
	@scripts/step "building the code-interpreter-v1 template, unless it exists" $(RELEASE)/jiffy template build code-interpreter-v1

.PHONY: templates
templates: setup build ## build the stock templates base, code-interpreter-v1, node, browser, docker (four to seven minutes; once, until a recipe changes)
	@$(MAKE) built-templates

# Uses the existing programs, because cargo may be locked by another build.
.PHONY: built-templates
built-templates:
	@for name in base code-interpreter-v1 node browser docker; do \
	    scripts/step "building the $$name template, unless it exists" $(RELEASE)/jiffy template build $$name || exit 1; \
	done

.PHONY: run
run: export JIFFY_QUICK := $(QUICK)
run: RELEASE := $(if $(QUICK),$(TARGET_DIR)/quick,$(RELEASE))
run: setup template ## build programs with few optimisations, and run a demonstration of sandboxes
	@scripts/demo

.PHONY: test
test: setup template interpreter ## run all tests and print totals (skips tests of templates that cannot be built, unless CI is set)
	@$(MAKE) templates || [ -z "$${CI:-}" ]
	@scripts/test

.PHONY: soak
soak: setup template ## run long tests for SOAK_SECONDS (1800): random operations on real guests under kills on each engine, and tests at full size
	@scripts/soak $(SOAK_SECONDS)

.PHONY: fuzz
fuzz: ## fuzz each target for FUZZ_SECONDS (600)
	@scripts/fuzz $(FUZZ_SECONDS)

.PHONY: fuzz-brief
fuzz-brief: ## fuzz each target for 2 s
	@scripts/fuzz --brief 2

.PHONY: fuzz-build
fuzz-build: ## build the targets of fuzz-brief
	@scripts/fuzz --brief 0

.PHONY: lint
lint: ## check formatting, lints and English; warnings are errors
	@scripts/lint

.PHONY: deny
deny: ## check dependencies with cargo-deny (installed first if it is missing, which takes minutes)
	@cargo deny --version >/dev/null 2>&1 || cargo install --locked cargo-deny
	@cargo deny check

.PHONY: docs
docs: ## generate the references and the book (builds mdBook once)
	@scripts/docs

.PHONY: kernel
kernel: ## build the guest kernel from source (long)
	@kernel/build

.PHONY: screenshots
screenshots: build template ## screenshots of the web console in target/screenshots
	@scripts/step "screenshots of the web console" tests/console/run --screenshots "$(TARGET_DIR)/screenshots"

.PHONY: bench
bench: setup template interpreter instruments ## measure this host
	@if [ -x bench/run ]; then bench/run; else echo "make bench: bench/run does not exist"; exit 1; fi

.PHONY: bench-gate
bench-gate: setup template instruments ## compare the costs of each operation, in counts, with the stored figures
	@scripts/bench-gate

.PHONY: install
install: ## install into PREFIX (/usr/local); requires `make build`
	@scripts/package --programs $(RELEASE) --install "$(DESTDIR)$(PREFIX)" --prefix "$(PREFIX)"

.PHONY: package
package: ## build packages in target/packages: wheels, .deb, archive, npm, image, and the built stock templates
	@packaging/programs $(TARGET_DIR)/reproducible/programs
	@scripts/step "building packages" packaging/all $(TARGET_DIR)/reproducible/programs

.PHONY: clean
clean: ## remove build results (not the data directory with templates)
	@cargo clean
