import { Component, type ReactNode } from "react";
import { describeError } from "../api/client";
import { reload } from "../lib/lazily";
import { Button } from "../ui/Button";
import { Notice } from "../ui/Notice";

/** Keeps the rest of the page where a view fails while it is drawn, and offers to draw it again. */
export class Boundary extends Component<{ children: ReactNode }, { error: unknown }> {
  override state: { error: unknown } = { error: null };

  static getDerivedStateFromError(error: unknown) {
    return { error };
  }

  override render() {
    if (this.state.error === null) return this.props.children;
    return (
      <Notice
        kind="error"
        actions={
          <>
            <Button onClick={() => this.setState({ error: null })}>Try again</Button>
            <Button onClick={reload}>Reload the page</Button>
          </>
        }
      >
        This view failed: {describeError(this.state.error)}
      </Notice>
    );
  }
}
