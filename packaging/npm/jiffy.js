#!/usr/bin/env node
// Runs the program jiffy from the package for this platform.
"use strict";

const { spawn } = require("node:child_process");
const { constants } = require("node:os");
const path = require("node:path");

const HOST = "@jiffy/host-linux-x64";
// Exit code of `jiffy run` for errors of Jiffy.
const JIFFY_ERROR = 125;

function fail(message) {
  console.error(`jiffy: ${message}`);
  process.exit(JIFFY_ERROR);
}

function programPath() {
  try {
    return path.join(path.dirname(require.resolve(`${HOST}/package.json`)), "bin", "jiffy");
  } catch {
    const platform = `${process.platform}-${process.arch}`;
    if (platform !== "linux-x64") {
      fail(`this package has no programs for ${platform}: sandboxes need a Linux host with x86-64`);
    }
    fail(`the package ${HOST} is not installed: run npm install without --omit=optional`);
  }
}

const child = spawn(programPath(), process.argv.slice(2), { stdio: "inherit" });
// A terminal sends its signals to both processes. The child determines the exit code.
for (const signal of ["SIGINT", "SIGQUIT"]) process.on(signal, () => {});
for (const signal of ["SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
child.on("error", (error) => fail(`cannot run ${error.path}: ${error.message}`));
child.on("exit", (code, signal) => process.exit(code ?? 128 + constants.signals[signal]));
