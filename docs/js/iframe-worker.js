// Search without a server. A browser starts no worker from a file, so a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.srcdoc =
        `<script>window.postMessage = (data) => frameElement.answer(data)</script>` +
        `<script src="${url}"></script>`;
      this.ready = new Promise((resolve) => (this.frame.onload = resolve));
      document.documentElement.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
