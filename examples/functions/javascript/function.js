import { handle } from "./handler.js";

addEventListener("fetch", (event) => event.respondWith(handle(event.request)));
