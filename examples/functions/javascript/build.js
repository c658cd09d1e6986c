// Builds function.wasm from function.js and the modules that it imports.
import { componentize } from "@bytecodealliance/componentize-js";
import { existsSync } from "node:fs";
import { mkdir, readFile, readdir, writeFile } from "node:fs/promises";

// jco's WASI interfaces, with the version that componentize-js implements.
const [theirs, ours] = ["0.2.12", "0.2.10"];
const modules = ["node_modules", "../node_modules"].find(existsSync);
const interfaces = `${modules}/@bytecodealliance/jco/lib/wit/builtin/${theirs}`;
const wit = ".build/wit";
for (const name of await readdir(interfaces)) {
  const text = await readFile(`${interfaces}/${name}/package.wit`, "utf8");
  await mkdir(`${wit}/deps/${name}`, { recursive: true });
  await writeFile(`${wit}/deps/${name}/package.wit`, text.replaceAll(theirs, ours));
}
const world = `package local:function;\n\nworld function {\n  include wasi:http/proxy@${ours};\n}\n`;
await writeFile(`${wit}/world.wit`, world);

const { component } = await componentize({
  sourcePath: "function.js",
  witPath: wit,
  worldName: "function",
});
await writeFile("function.wasm", component);
