// Browsers start no worker from file://. There the theme's search runs in a hidden frame, which sends and receives
// messages as a worker does. The theme looks for the name `IFrameWorker`, and its plugin `offline` for this file's.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      const page = this.inside.document
      page.open() // or Firefox would put another page in its place when the frame has loaded
      page.write("<body></body>")
      page.close()
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = page.createElement("script")
      script.src = new URL(url, location)
      this.started = new Promise(resolve => { script.onload = resolve })
      page.body.append(script)
    }

    async postMessage(data) {
      await this.started
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
