// Browsers start no worker from a file. The search then runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<title>search</title>";
      this.ready = new Promise((ready) => {
        this.frame.addEventListener("load", () => {
          const { contentWindow: page, contentDocument: body } = this.frame;
          page.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = body.createElement("script");
          script.src = url;
          script.addEventListener("load", () => ready(page));
          body.body.append(script);
        }, { once: true });
      });
      document.body.append(this.frame);
    }

    async postMessage(data) {
      const page = await this.ready;
      page.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
