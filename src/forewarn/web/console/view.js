// What all views share: a custom element that listens to the store while it is on the page.

import { explain } from "./actions.js";
import { RETRY_MILLISECONDS } from "./api.js";
import { h } from "./dom.js";

export class View extends HTMLElement {
  #stop = new AbortController();
  #problem = h("div", { class: "card", role: "alert" });
  #last = Promise.resolve();

  async connectedCallback() {
    this.build();
    const options = { signal: this.#stop.signal };
    this.store.addEventListener("change", (event) => this.redraw(event.detail), options);
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
  redraw(change) {
    this.#last = this.#last.catch(() => {}).then(() => this.isConnected && this.#try(change));
    return this.#last;
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
}
