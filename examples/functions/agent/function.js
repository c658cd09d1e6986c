import { getEnvironment } from "wasi:cli/environment@0.2.10";
import { handle } from "./handler.js";

addEventListener("fetch", (event) => {
  event.respondWith(handle(event.request, Object.fromEntries(getEnvironment())));
});
