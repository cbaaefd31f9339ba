// What all views share: a custom element that listens to the store while it is on the page.

import { explain } from "./actions.js";
import { h } from "./dom.js";

export class View extends HTMLElement {
  #stop = new AbortController();

  async connectedCallback() {
    this.build();
    const options = { signal: this.#stop.signal };
    this.store.addEventListener("change", (event) => this.#update(event.detail), options);
    this.store.addEventListener("entry", (event) => this.entry(event.detail), options);
    await this.#update({ isAll: true });
    this.parentElement?.setAttribute("data-ready", "");
  }

  disconnectedCallback() {
    this.#stop.abort();
  }

  /** Call this now and then while the view is on the page. */
  every(milliseconds, action) {
    const timer = setInterval(action, milliseconds);
    this.#stop.signal.addEventListener("abort", () => clearInterval(timer));
  }

  async #update(change) {
    try {
      await this.update(change);
    } catch (error) {
      if (error.status === 0) return; // the page says that it is stale, and reads again later
      this.replaceChildren(h("h1", {}, "Not available"), h("p", { role: "alert" }, explain(error)));
    }
  }

  /** Make the parts that stay. */
  build() {}

  /** Show the store's content. `change` has `isAll`, or what changed: `vms`, `events`, `hosts`, `campaigns`. */
  update() {}

  /** An entry of the history has arrived. */
  entry() {}
}
