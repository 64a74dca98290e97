// Browsers start no worker for a page that is opened from a disk. There, a hidden frame runs the worker's script: the
// search of the site works without a server.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = (data) => this.answer(data)
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)))
      this.load(url).then(() => {
        this.isReady = true
        this.waiting.splice(0).forEach((data) => this.deliver(data))
      })
    }

    load(url) {
      return new Promise((loaded, failed) => {
        const script = this.frame.contentDocument.createElement("script")
        Object.assign(script, { src: new URL(url, location), onload: loaded, onerror: failed })
        this.frame.contentDocument.body.append(script)
      })
    }

    postMessage(data) {
      if (this.isReady) this.deliver(data)
      else this.waiting.push(data)
    }

    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    answer(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }

    terminate() {
      this.frame.remove()
    }
  }
