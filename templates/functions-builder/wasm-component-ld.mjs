#!/usr/local/bin/node
// Linker of Rust's target wasm32-wasip2: wasm-ld, then jco's encoder of components. Rust's own
// wasm-component-ld is in no registry of packages but as source, which takes minutes to compile.
import {
  componentNew,
  preview1AdapterCommandPath,
  preview1AdapterReactorPath,
} from "@bytecodealliance/jco";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";

const PREVIEW1 = "wasi_snapshot_preview1";

// Response files, as rustc writes them: a line for each argument, special characters escaped.
const expand = (argument) =>
  argument.startsWith("@")
    ? readFileSync(argument.slice(1), "utf8")
        .split("\n")
        .filter(Boolean)
        .map((line) => line.replace(/\\(.)/g, "$1"))
    : [argument];

const given = process.argv.slice(2).flatMap(expand);
if (given[0] === "-flavor") given.splice(0, 2);
const at = given.findIndex((argument) => argument === "-o" || argument === "--output");
if (at < 0) throw new Error("wasm-component-ld: no -o");
const [, output] = given.splice(at, 2);
const isLibrary = given.includes("-shared") || given.includes("--shared");
const isCore = isLibrary || given.includes("--skip-wit-component");
const passed = given.filter((argument) => argument !== "--skip-wit-component");

// Under the same name, which goes into the module.
const directory = mkdtempSync(join(dirname(output), "link-"));
try {
  const linked = isCore ? output : join(directory, basename(output));
  const linker = spawnSync("wasm-ld-16", [...passed, "-o", linked], { stdio: "inherit" });
  if (linker.error) throw linker.error;
  if (linker.status !== 0) {
    process.exitCode = 1;
  } else if (!isCore) {
    const core = readFileSync(linked);
    const exported = WebAssembly.Module.exports(new WebAssembly.Module(core));
    const isCommand = exported.some(({ name }) => name === "_start");
    const adapter = isCommand ? preview1AdapterCommandPath() : preview1AdapterReactorPath();
    writeFileSync(output, await componentNew(core, [[PREVIEW1, readFileSync(adapter)]]));
  }
} finally {
  rmSync(directory, { recursive: true });
}
