// The log follows the text as it grows, unless the reader has scrolled up.

const NEAR_END = 48; // pixels

export class Scroll {
  constructor(log, content) {
    this.log = log;
    this.content = content;
    this.isFollowing = true;
    this.lastTop = 0;
    log.addEventListener("scroll", () => this.look());
    const observer = new ResizeObserver(() => this.isFollowing && this.toEnd());
    for (const element of [log, content]) observer.observe(element);
  }

  follow() {
    this.isFollowing = true;
    this.toEnd();
  }

  /** Without messages there is a welcome, which is read from its beginning. */
  toEnd() {
    this.log.scrollTo(0, this.content.childElementCount ? this.log.scrollHeight : 0);
  }

  /** Growing text moves its end away; only going up is the reader's wish. */
  look() {
    const { scrollTop, scrollHeight, clientHeight } = this.log;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    if (isAtEnd) this.isFollowing = true;
    else if (scrollTop < this.lastTop) this.isFollowing = false;
    this.lastTop = scrollTop;
  }
}
