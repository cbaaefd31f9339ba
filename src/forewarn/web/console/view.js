// What all views share: a custom element that listens to the store while it is on the page.

import { explain } from "./actions.js";
import { RETRY_MILLISECONDS } from "./api.js";
import { h } from "./dom.js";

export class View extends HTMLElement {
  #stop = new AbortController();
  #problem = h("div", { class: "card", role: "alert" });
  #isBusy = false;
  #next = null;

  async connectedCallback() {
    this.build();
    const options = { signal: this.#stop.signal };
    this.store.addEventListener("change", (event) => this.redraw(event.detail), options);
    this.store.addEventListener("entry", (event) => this.entry(event.detail), options);
    await this.redraw({ isAll: true });
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

  /** One update after the other: a slow response must not overwrite a newer one. */
  async redraw(change) {
    this.#next = { isAll: true };
    if (this.#isBusy) return;
    this.#isBusy = true;
    try {
      for (let current = change; current; current = this.#next) {
        this.#next = null;
        await this.#try(current);
      }
    } finally {
      this.#isBusy = false;
    }
  }

  async #try(change) {
    try {
      await this.update(change);
      this.#problem.remove();
    } catch (error) {
      this.#problem.replaceChildren(h("h2", {}, "Not available"), h("p", {}, explain(error)));
      this.prepend(this.#problem);
      const isOver = error.status >= 400 && error.status < 500;
      if (!isOver) setTimeout(() => this.isConnected && this.redraw({ isAll: true }), RETRY_MILLISECONDS);
    }
  }

  /** Make the parts that stay. */
  build() {}

  /** Show the store's content. `change` has `isAll`, or what changed: `vms`, `events`, `hosts`, `campaigns`. */
  update() {}

  /** An entry of the history has arrived. */
  entry() {}
}
