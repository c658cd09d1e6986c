# The one door: `make` lists what can be done here. Each target does what it needs first, and says what it does.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PREFIX ?= /usr/local
FUZZ_SECONDS ?= 600
SOAK_SECONDS ?= 1800

# The Rust to use, if the one pinned in rust-toolchain.toml is not installed but a newer one is.
TOOLCHAIN := $(shell scripts/toolchain 2>/dev/null)
ifneq ($(TOOLCHAIN),)
export RUSTUP_TOOLCHAIN := $(TOOLCHAIN)
endif

export TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
# Directory of the programs (PROGRAMS of scripts/lib).
RELEASE := $(TARGET_DIR)/$(if $(CI),ci/programs,release)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: ## install what is missing to build and run (Debian packages; checks Rust)
	@scripts/setup

.PHONY: build
build: ## build jiffy, jiffy-vmm, jiffy-functions, jiffy-gvisor and the guest's jiffy-agent
	@scripts/build

.PHONY: instruments
instruments: build ## build jiffy-instruments, with which scripts in bench/ measure
	@scripts/instruments

.PHONY: template
template: setup build ## build the base template (a minute or two; once, until its recipe changes)
	@scripts/step "building the base template, unless it is there" $(RELEASE)/jiffy template build base

.PHONY: interpreter
interpreter: setup build ## build the code interpreter's template (one to two minutes; once, until its recipe changes)
	@scripts/step "building the code-interpreter-v1 template, unless it is there" $(RELEASE)/jiffy template build code-interpreter-v1

.PHONY: templates
templates: setup build ## build the stock templates base, code-interpreter-v1, node, browser, docker (four to seven minutes; once, until a recipe changes)
	@$(MAKE) built-templates

# With the programs that are there: cargo, which would only find that out, may be busy with others.
.PHONY: built-templates
built-templates:
	@for name in base code-interpreter-v1 node browser docker; do \
	    scripts/step "building the $$name template, unless it is there" $(RELEASE)/jiffy template build $$name || exit 1; \
	done

.PHONY: run
run: setup template ## build everything and show sandboxes at work
	@scripts/demo

.PHONY: test
test: setup template interpreter ## run all tests; ends with totals (those of templates that cannot be built are skipped, but not where CI is set)
	@$(MAKE) templates || [ -z "$${CI:-}" ]
	@scripts/test

.PHONY: soak
soak: setup template ## run for SOAK_SECONDS (1800) what takes long: random lives of real guests under kills on each engine, and tests at full size
	@scripts/soak $(SOAK_SECONDS)

.PHONY: fuzz
fuzz: ## fuzz each target for FUZZ_SECONDS (600)
	@scripts/fuzz $(FUZZ_SECONDS)

.PHONY: fuzz-brief
fuzz-brief: ## fuzz each target for 2 s
	@scripts/fuzz --brief 2

.PHONY: fuzz-build
fuzz-build: ## build what fuzz-brief needs
	@scripts/fuzz --brief 0

.PHONY: lint
lint: ## check formatting and lints; warnings are errors
	@scripts/lint

.PHONY: deny
deny: ## check dependencies with cargo-deny (compiled first if it is missing, which takes minutes)
	@cargo deny --version >/dev/null 2>&1 || cargo install --locked cargo-deny
	@cargo deny check

.PHONY: docs
docs: ## write the generated references anew, and the book (mdBook is built once)
	@scripts/docs

.PHONY: kernel
kernel: ## build the guest kernel from source (long)
	@kernel/build

.PHONY: bench
bench: setup template interpreter instruments ## measure
	@if [ -x bench/run ]; then bench/run; else echo "make bench: there is no bench/run here yet."; exit 1; fi

.PHONY: bench-gate
bench-gate: setup template instruments ## compare what each operation costs, in counts, with the figures that are kept
	@scripts/bench-gate

.PHONY: install
install: ## install into PREFIX (/usr/local); run `make build` first
	@scripts/package --programs $(RELEASE) --install "$(DESTDIR)$(PREFIX)" --prefix "$(PREFIX)"

.PHONY: package
package: ## build packages into target/packages: wheels, .deb, archive, npm, image; with the stock templates that are built
	@packaging/programs $(TARGET_DIR)/reproducible/programs
	@scripts/step "building packages" packaging/all $(TARGET_DIR)/reproducible/programs

.PHONY: clean
clean: ## remove build results (not the data directory with templates)
	@cargo clean
