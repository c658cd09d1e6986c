import { getEnvironment } from "wasi:cli/environment@0.2.10";
import { handle } from "./handler.js";

addEventListener("fetch", (event) => event.respondWith(answer(event.request)));

// An error of the handler becomes a response.
async function answer(request) {
  try {
    return await handle(request, Object.fromEntries(getEnvironment()));
  } catch (error) {
    return new Response(`${error}\n`, { status: 500 });
  }
}
