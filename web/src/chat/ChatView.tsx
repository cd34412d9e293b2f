import { Empty } from "../ui/Notice";

export function ChatView(_: { conversationId: string }) {
  return <Empty title="Chat" />;
}
